"""Showing how a run goes, while it goes."""

from __future__ import annotations

import sys
import time
from shutil import get_terminal_size
from typing import Any

from tqdm import tqdm

from gaussnewton.experiments.budget import Budget
from gaussnewton.experiments.config import Config
from gaussnewton.experiments.record import Line, Result
from gaussnewton.experiments.run import Watcher

SYMBOLS = {"rate": "rate", "tau": "τ", "gamma": "γ", "rho": "ρ"}
Stream = Any
"""Whatever ``print`` writes to."""

QUIET_SECONDS = 30.0
"""Between two lines where nobody watches."""


def watcher(stream: Stream = None) -> Bar | Lines:
    """A bar on a terminal, and elsewhere a plain line now and then; a watcher for a run."""
    stream = sys.stdout if stream is None else stream
    return Bar(stream) if stream.isatty() else Lines(stream)


def duration(seconds: float) -> str:
    """Seconds for people.

    Example:
        >>> from gaussnewton.experiments.live import duration
        >>> duration(0.31), duration(75.0), duration(4000.0)
        ('0.3 s', '1 min 15 s', '1 h 06 min')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class Teller(Watcher):
    """What both ways of showing have.

    Attributes:
        prefix: goes before all that is said of a run, such as its place among many.
        suffix: goes after what is said of a run on its way, such as how long all will take.
        ran: how many runs there was something to do for.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream, self.prefix, self.suffix, self.ran = stream, "", "", 0

    def known(self, config: Config, result: Result) -> None:
        further = f"; asked: {_budget(config)}" if _went_further(config, result) else ""
        self._print(f"{summary(config, result)} (recorded before{further})")

    def begin(self, config: Config, update: int, seconds: float) -> None:
        self.meter = Meter(config, update, seconds)
        self.ran += 1
        if update:
            self._print(f"{config.the_method().label}: goes on from update {update}")

    def end(self, result: Result) -> None:
        self._print(summary(self.meter.config, result))

    def text(self) -> str:
        """The run on its way, in a line."""
        return f"{self.meter.config.the_method().label}: {self.meter.text()}{self.suffix}"

    def _print(self, text: str) -> None:
        print(self.prefix + text, file=self.stream, flush=True)


class Meter:
    """What there is to say about a run at any moment."""

    def __init__(self, config: Config, update: int, seconds: float) -> None:
        self.config, self.update, self.seconds = config, update, seconds
        self.began, self.fraction_then = time.monotonic(), config.progress(update, seconds)
        self.shown: dict[str, float] = {}

    def take(self, line: Line) -> None:
        """Note the last value of each thing that is shown."""
        self.update, self.seconds = line["update"], line["seconds"]
        for key in ("batch_loss", "loss", "averaged_loss", *SYMBOLS):
            if line.get(key) is not None:
                self.shown[key] = line[key]

    @property
    def fraction(self) -> float:
        """Of the budget."""
        return self.config.progress(self.update, self.seconds)

    def text(self) -> str:
        """All of it in a line, what matters most first."""
        return "  ".join(
            part for part in (self.loss(), self.count(), self.left(), self.numbers()) if part
        )

    def loss(self) -> str:
        """The training loss as it was evaluated last, with averaged parameters if there are."""
        known = (self.shown.get(key) for key in ("averaged_loss", "loss", "batch_loss"))
        value = next((each for each in known if each is not None), None)
        return "" if value is None else f"loss {value:.4g}"

    def count(self) -> str:
        """Updates so far, of how many."""
        total = self.config.updates
        return f"{self.update}/{total}" if total else f"update {self.update}"

    def left(self) -> str:
        """The time that the rest will take, as things go; evaluation included."""
        done = self.fraction - self.fraction_then
        if done <= 0:
            return ""
        spent = time.monotonic() - self.began
        return f"{duration(spent * (1 - self.fraction) / done)} left"

    def numbers(self) -> str:
        """What the method says."""
        said = [(name, self.shown[key]) for key, name in SYMBOLS.items() if key in self.shown]
        return "  ".join(f"{name} {value:.2g}" for name, value in said)


class Bar(Teller):
    """A bar that moves, for a terminal."""

    def begin(self, config: Config, update: int, seconds: float) -> None:
        super().begin(config, update, seconds)
        self.bar: tqdm[Any] = tqdm(
            total=1.0,
            initial=self.meter.fraction,
            bar_format="{percentage:3.0f}% |{bar:8}| {desc}",
            desc=self.prefix + config.the_method().label,
            file=self.stream,
            leave=False,
            # Not tqdm's own look: in a terminal that does not know its size it shows nothing.
            ncols=get_terminal_size().columns,
            nrows=get_terminal_size().lines,
        )

    def line(self, line: Line) -> None:
        self.meter.take(line)
        self.bar.ncols = get_terminal_size().columns
        self.bar.set_description_str(self.prefix + self.text(), refresh=False)
        self.bar.update(self.meter.fraction - self.bar.n)

    def end(self, result: Result) -> None:
        self.bar.close()
        super().end(result)


class Lines(Teller):
    """A plain line now and then, for a log."""

    def __init__(self, stream: Stream, every: float = QUIET_SECONDS) -> None:
        super().__init__(stream)
        self.every = every

    def begin(self, config: Config, update: int, seconds: float) -> None:
        super().begin(config, update, seconds)
        self.said = time.monotonic()

    def line(self, line: Line) -> None:
        self.meter.take(line)
        if time.monotonic() - self.said >= self.every:
            self.said = time.monotonic()
            self._print(self.text())


def summary(config: Config, result: Result) -> str:
    """One line about a run that ended or was stopped.

    Example:
        >>> from gaussnewton.experiments.config import configure
        >>> from gaussnewton.experiments.live import summary
        >>> from gaussnewton.experiments.record import Result
        >>> summary(configure("tiny", "adam"), Result("finished", 1000, 12.0, 25.31))
        'Adam: finished after 1000 updates in 12 s, loss 25.31'
    """
    text = f"{config.the_method().label}: {result.status} after {result.update} updates"
    text += f" in {duration(result.seconds)}"
    if result.reason:
        return f"{text}: {result.reason.split('. ')[0].rstrip('.')}"
    if result.averaged_loss is not None:
        text += f", loss {result.averaged_loss:.4g} with averaged parameters"
        return text if result.loss is None else f"{text}, {result.loss:.4g} without"
    return text if result.loss is None else f"{text}, loss {result.loss:.4g}"


def _budget(config: Config) -> str:
    return Budget(config.updates, config.seconds).own


def _went_further(config: Config, result: Result) -> bool:
    """Whether a run was recorded beyond a budget, by more than the update that ends it."""
    before_last = max(result.update - 1, 0)
    seconds = result.seconds * before_last / max(result.update, 1)
    return config.spent(before_last, seconds)
