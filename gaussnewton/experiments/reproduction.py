"""The paper's figures, from training to files: run what they need, compute, draw, save."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from gaussnewton.experiments.budget import Budget, at_least
from gaussnewton.experiments.claims import DATA_SETS
from gaussnewton.experiments.config import Config, configure, with_threads_of
from gaussnewton.experiments.data import Batches
from gaussnewton.experiments.figures import FIGURES, alignment, load
from gaussnewton.experiments.lineup import ADAM, LOSSES, RATES, adam_lines, drawn, entries
from gaussnewton.experiments.live import Bar, Lines
from gaussnewton.experiments.problems import Data, problem
from gaussnewton.experiments.record import Folder, Run, read_run, read_runs
from gaussnewton.experiments.run import Watcher, train
from gaussnewton.experiments.search import folder_name, grid
from gaussnewton.experiments.stopping import Stopped, stopping

ALIGNED_AT = (1, 3, 10, 30, 100, 300, 1000, 3000, 5000)
SMALL_BATCH = 250
"""Of the alignment under a budget. The paper found no difference between 250 and 1000."""


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
        aligned: the problems whose alignment is looked at.
        watcher: is shown how runs go.
    """

    out: Path
    budget: Budget
    data: Path | None = None
    seed: int = 0
    threads: int | None = None
    search: bool = False
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
        of = DATA_SETS if name == "cpu" else (name,)
        shown, said = [], []
        for each in of:
            lines, adam = self._lines(each)
            title = FIGURES[each].title if each in FIGURES else problem(each).title
            shown.append({"title": title, "runs": lines})
            said.append(f"{adam} ({title})." if len(of) > 1 else f"{adam}.")
        only = problem(of[0]) if len(of) == 1 else None
        result = kind.compute(
            shown, budget=self._budget_text(only), note=" ".join([LOSSES, *dict.fromkeys(said)])
        )
        return [kind.save(result, self.out)["png"]]

    def _budget_text(self, of: Any) -> str:
        threads = self.threads or torch.get_num_threads()
        return f"{self.budget.text(of)}, {threads} thread{'s' if threads > 1 else ''}"

    # Runs

    def _lines_of(self, name: str) -> tuple[list[dict[str, Any]], str]:
        """All runs of a problem, as a figure wants them, and what Adam's settings are."""
        lines = [drawn(self._run(name, e.text), e, self.budget) for e in entries(name)]
        default = self._run(name, ADAM.text)
        if self.search:
            self._search(name, default)
        found = self._searched(name)
        if found:
            said = f"Tuned Adam is the best of {len(found) + 1} settings that were searched"
        else:
            found = [
                self._run(name, f"adam:rate={rate!r}", keep_checkpoint=False) for rate in RATES
            ]
            said = f"Tuned Adam is the best of {len(found) + 1} rates, not of the paper's grid"
        return [*lines, *adam_lines(default, found, self.budget)], said

    def _run(self, name: str, text: str, where: str = "", keep_checkpoint: bool = True) -> Run:
        """A run to the end of its budget; one that was recorded with a larger one is used."""
        config = self._config(name, text)
        folder = self.out / "runs" / name / where / folder_name(config)
        saved = Folder(folder).saved_config()
        if saved is not None:
            config = at_least(config, saved)
            config = with_threads_of(config, saved) if self.threads is None else config
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

    def _search(self, name: str, default: Run) -> None:
        """Run the paper's grid of Adam.

        Under the clock its decay periods are shares of the updates that Adam 1e-3 came to.
        """
        updates = self._config(name, ADAM.text).updates or default.lines[-1]["update"]
        for setting in grid(updates, ["adam"]):
            self._run(name, setting.text, "search", keep_checkpoint=False)

    def _searched(self, name: str) -> list[Run]:
        """Runs of Adam that a search left, of this seed and with this budget or more."""
        asked = self._config(name, ADAM.text)
        return [
            run
            for run in read_runs(self.out / "runs" / name / "search")
            if run.result is not None
            and run.config.the_method().name == "adam"
            and run.config.seed == self.seed
            and run.config.batch == asked.batch
            and (run.result.status == "diverged" or not run.config.ends_before(asked))
        ]

    # Alignment

    def _alignment(self, name: str) -> Path:
        """One data set's, unless it is there already just as it is asked for."""
        saved = self.out / f"alignment-{name}.json"
        what = problem(name)
        batch = what.batch if self.budget.full else min(what.batch, SMALL_BATCH)
        text = f"{self.budget.own or 'full size'}, batches of {batch}"
        asked = {"seed": self.seed, "budget": text}
        if saved.exists() and load(saved).get("asked") == asked:
            return saved.with_suffix(".png")
        x, y = self._read(name)
        batches = Batches(x, y, batch, self.seed)
        most = self.budget.updates or ALIGNED_AT[-1]
        with stopping() as stop:
            result = alignment.compute(
                what.network(self.seed), what.criterion(), batches,
                title=name.upper(), updates=sorted({t for t in ALIGNED_AT if t < most} | {most}),
                budget=text, stop=self._until(lambda: stop.asked), progress=sys.stderr.isatty(),
            )  # fmt: skip
            asked_to_stop = stop.asked
        if result["updates"]:
            whole = {} if asked_to_stop else {"asked": asked}  # a part is made anew
            FIGURES["alignment"].save({**result, **whole}, self.out, saved.stem)
        if asked_to_stop:
            raise Stopped
        return saved.with_suffix(".png")

    def _until(self, stop: Callable[[], bool]) -> Callable[[int], bool]:
        """Whether to end: after Ctrl-C at once, after the seconds once there is a point."""
        began, most = time.monotonic(), self.budget.seconds
        return lambda points: (
            stop() or (most is not None and points > 0 and time.monotonic() - began >= most)
        )
