"""The paper's figures, from training to files: run what they need, compute, draw, save."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from gaussnewton.experiments.aligning import aligning
from gaussnewton.experiments.budget import Budget
from gaussnewton.experiments.claims import DATA_SETS
from gaussnewton.experiments.config import Config, configure, with_threads_of
from gaussnewton.experiments.figures import FIGURES, alignment, load
from gaussnewton.experiments.lineup import (
    ADAM,
    CPU_DEPARTS,
    LOSSES,
    RATES,
    Drawn,
    adam_lines,
    drawn,
    entries,
    setting_of,
    threads_text,
    titled_alike,
)
from gaussnewton.experiments.live import Bar, Lines
from gaussnewton.experiments.methods import method
from gaussnewton.experiments.problems import Data, problem
from gaussnewton.experiments.record import Folder, Run, read_run, read_runs
from gaussnewton.experiments.run import Watcher, train
from gaussnewton.experiments.search import folder_name, grid
from gaussnewton.experiments.stopping import Stopped

SEARCHES = Path("runs")
"""Where ``gaussnewton search`` records its runs if it is not told."""


@dataclass
class Reproduction:
    """Makes figures in a folder, from runs below it that are made once and go on if stopped.

    Attributes:
        out: figures are saved here, runs in ``runs/PROBLEM/METHOD`` below.
        budget: of each method.
        data: the folder with data files, if they are not to be downloaded.
        seed: of everything.
        threads: of torch; by default its own choice, or that of the run that goes on.
        search: whether to run the paper's grid for Adam.
        searches: runs of Adam in ``PROBLEM/search`` below it are used too: those that
            ``gaussnewton search`` left.
        aligned: the problems whose alignment is looked at.
        watcher: is shown how runs go.
    """

    out: Path
    budget: Budget
    data: Path | None = None
    seed: int = 0
    threads: int | None = None
    search: bool = False
    searches: Path = SEARCHES
    aligned: Sequence[str] = DATA_SETS
    watcher: Watcher = field(default_factory=Watcher)

    def __post_init__(self) -> None:
        self._read: Any = lru_cache(maxsize=1)(self._data)
        # The figure of the CPU shows the same runs as others.
        self._lines: Any = lru_cache(maxsize=None)(self._lines_of)

    def make(self, name: str) -> list[Path]:
        """Make a figure by its name; returns the drawings as PNG.

        Raises:
            Stopped: by Ctrl-C. What was measured is saved, and making it again goes on from there.
        """
        if name == "alignment":
            return [self._alignment(each) for each in self.aligned]
        kind = FIGURES[name]
        if kind.needs == "nothing":
            return [kind.save(kind.compute(seed=self.seed), self.out)["png"]]
        shown, note = self._cpu() if name == "cpu" else self._panel(name)
        lines = [line for panel in shown for line in panel["runs"]]
        only = None if name == "cpu" else problem(name)
        budget = f"{self.budget.text(only)}, {threads_text(lines)}"
        return [kind.save(kind.compute(shown, budget=budget, note=note), self.out)["png"]]

    def _panel(self, name: str) -> tuple[list[dict[str, Any]], str]:
        """What the figure of a problem shows, and what is to be said of it."""
        lines, of = self._lines(name)
        panel = {"title": FIGURES[name].title, "runs": lines}
        return [panel], f"{LOSSES} Tuned Adam is the best of {of}."

    def _cpu(self) -> tuple[list[dict[str, Any]], str]:
        """The same of the three autoencoders together."""
        panels, said = [], []
        for name in DATA_SETS:
            lines, of = self._lines(name)
            runs, rate = titled_alike(lines)
            panels.append({"title": FIGURES[name].title, "runs": runs})
            said.append(f"{FIGURES[name].title}: {rate}, the best of {of}")
        return panels, f"{LOSSES} Tuned Adam: {'; '.join(said)}. {CPU_DEPARTS}"

    # Runs

    def _lines_of(self, name: str) -> tuple[list[Drawn], str]:
        """All runs of a problem, as a figure wants them, and of what tuned Adam is the best."""
        lines = [drawn(self._run(name, e.text), e, self.budget) for e in entries(name)]
        default = self._run(name, ADAM.text)
        # Under the clock decay periods are shares of the updates that Adam 1e-3 came to.
        updates = self._config(name, ADAM.text).updates or default.lines[-1]["update"]
        settings = grid(updates, ["adam"])
        if self.search:
            for setting in settings:
                self._run(name, setting.text, "search", keep_checkpoint=False)
        tried = self._tried(name, default, updates)
        papers = {setting_of(each, updates) for each in settings}
        said = f"{len(tried)} settings, {len(papers & set(tried))} of the grid's {len(papers)}"
        others = [run for run in tried.values() if run is not default]
        return [*lines, *adam_lines(default, others, self.budget)], said

    def _tried(self, name: str, default: Run, updates: int) -> dict[tuple[float, int | None], Run]:
        """Runs of Adam by setting: what searches left, and always the four rates.

        A search may have been stopped anywhere, before any rate that is good for something.
        """

        def by_setting(runs: Iterable[Run]) -> dict[tuple[float, int | None], Run]:
            return {setting_of(run.config.the_method(), updates): run for run in runs}

        found = by_setting([*self._searched(name), default])
        rates = [method(f"adam:rate={rate!r}") for rate in RATES]
        missing = [each for each in rates if setting_of(each, updates) not in found]
        own = (self._run(name, each.text, keep_checkpoint=False) for each in missing)
        return found | by_setting(own)

    def _run(self, name: str, text: str, where: str = "", keep_checkpoint: bool = True) -> Run:
        """A run to the end of its budget; one that was recorded with a larger one is used."""
        config = self._config(name, text)
        folder = self.out / "runs" / name / where / folder_name(config)
        saved = Folder(folder).saved_config()
        if saved is not None and self.threads is None:
            config = with_threads_of(config, saved)
        self._say(f"{name}  ")
        result = train(
            config,
            folder,
            data=partial(self._read, name),
            keep_checkpoint=keep_checkpoint,
            watcher=self.watcher,
        )
        if result.status == "stopped":
            raise Stopped
        return read_run(folder)

    def _say(self, prefix: str) -> None:
        if isinstance(self.watcher, (Bar, Lines)):
            self.watcher.prefix = prefix

    def _config(self, name: str, text: str) -> Config:
        return configure(
            name, text, seed=self.seed, threads=self.threads,
            updates=self.budget.updates, seconds=self.budget.seconds,
        )  # fmt: skip

    def _data(self, name: str) -> Data:
        return problem(name).data(self.data)

    def _searched(self, name: str) -> list[Run]:
        """Runs of Adam that a search left, of this seed and with this budget or more."""
        asked = self._config(name, ADAM.text)
        places = [self.searches / name / "search", self.out / "runs" / name / "search"]
        return [
            run
            for place in places
            for run in read_runs(place)
            if run.result is not None
            and run.config.the_method().name == "adam"
            and run.config.seed == self.seed
            and (run.config.batch, run.config.dtype) == (asked.batch, asked.dtype)
            and not run.config.the_method().values["weight_decay"]
            and (
                run.result.status == "diverged"
                or asked.spent(run.result.update, run.result.seconds)
            )
        ]

    # Alignment

    def _alignment(self, name: str) -> Path:
        """One data set's, unless it is there already just as it is asked for."""
        runs = self.out / "runs" / "alignment"
        work = aligning(name, self.budget, runs, seed=self.seed, threads=self.threads)
        text = f"{self.budget.own or 'full size'}, batches of {work.config.batch}"
        saved = self.out / f"alignment-{name}.json"
        if saved.exists() and self._is_asked(load(saved), text):
            return saved.with_suffix(".png")
        self._say(f"alignment of {name}  ")
        ended = work.run(partial(self._read, name), self.watcher)
        points = work.points()
        if points:
            threads = work.config.threads
            said = f"{text}, {threads_text([{'threads': [threads]}])}"
            result = alignment.gathered(points, title=name.upper(), budget=said)
            asked = {"seed": self.seed, "budget": text, "threads": threads}
            whole = {"asked": asked} if ended else {}  # of a part more is to come
            FIGURES["alignment"].save({**result, **whole}, self.out, saved.stem)
        if not ended:
            raise Stopped
        return saved.with_suffix(".png")

    def _is_asked(self, result: dict[str, Any], text: str) -> bool:
        asked = result.get("asked", {})
        mine = asked.get("seed") == self.seed and asked.get("budget") == text
        return mine and self.threads in (None, asked.get("threads"))
