"""A run on disk: what was asked, what happened, where it stands, and with what software.

A run's folder holds

``config.json``
    the :class:`~gaussnewton.experiments.config.Config`;
``metrics.jsonl``
    one JSON object a line, an update each, update 0 being the start;
``checkpoint.pt``
    model, optimiser, batches and random state, for ``torch.load(weights_only=True)``;
``result.json``
    only when the run has ended: its status, "finished" or "diverged", and its last losses;
``versions.json``
    of Python, torch and this package, and the platform.
"""

from __future__ import annotations

import io
import json
import math
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch

import gaussnewton
from gaussnewton.errors import BusyError, ExperimentError
from gaussnewton.experiments.config import BUDGET, Config
from gaussnewton.experiments.writing import clear_parts, write_whole

CONFIG, METRICS, CHECKPOINT = "config.json", "metrics.jsonl", "checkpoint.pt"
RESULT, VERSIONS, LOCK = "result.json", "versions.json", ".lock"

REMEDIES = {
    CONFIG: "Delete its folder to run it again.",
    METRICS: "Delete that line to go without it, or the folder to run it again.",
    CHECKPOINT: "Delete it to start that run again.",
    RESULT: "Delete it to go on with that run from its checkpoint.",
    VERSIONS: "Delete it: it is written anew.",
}
"""What to do where a file is damaged."""

Line = dict[str, Any]
"""One line of ``metrics.jsonl``."""


@dataclass(frozen=True)
class Result:
    """How a run ended, or where it stands.

    Attributes:
        status: "finished", "diverged", or "stopped" if there is more to do.
        update: updates done.
        seconds: spent in them.
        loss: of the training data evaluated last, with the parameters of then; None if it is
            not finite, or was never evaluated.
        averaged_loss: the same with averaged parameters; None if the method has none.
        reason: why it diverged.
    """

    status: str
    update: int
    seconds: float
    loss: float | None = None
    averaged_loss: float | None = None
    reason: str | None = None

    @property
    def score(self) -> float:
        """What runs are compared by: the averaged loss where there is one; inf if diverged."""
        if self.status == "diverged":
            return math.inf
        value = self.loss if self.averaged_loss is None else self.averaged_loss
        return math.inf if value is None else value


def as_json(values: dict[str, Any]) -> str:
    """One line of JSON; what is not finite becomes null, because JSON has no NaN."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
    return json.dumps(plain, allow_nan=False)


class Folder:
    """The files of a run, for the one process that is at work on it.

    Args:
        path: of the folder, which need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._metrics: IO[str] | None = None

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """No other process may write here meanwhile. A process that dies claims nothing."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / LOCK, "w") as lock:
            _lock(lock, self.path)
            clear_parts(self.path)
            try:
                yield
            finally:
                self.close()

    def saved_config(self) -> Config | None:
        """The configuration of the run that is here, if there is one."""
        values = self._read_json(CONFIG)
        return None if values is None else Config.from_dict(values, str(self.path / CONFIG))

    def save_config(self, config: Config) -> None:
        """Say what is asked."""
        if not (self.path / CONFIG).exists() and any(self.path.glob("*.jsonl")):
            raise ExperimentError(
                f"{self.path} has metrics but no {CONFIG}: it is not the folder of a run."
            )
        self._write_json(CONFIG, config.as_dict())

    def save_versions(self) -> None:
        """Say with what it is run; where a run goes on with something else, both are kept."""
        now = versions()
        before = self._read_json(VERSIONS)
        history = [] if before is None else before.get("history", [before])
        if not history or history[-1] != now:
            history.append(now)
        self._write_json(VERSIONS, now | ({"history": history} if len(history) > 1 else {}))

    def result(self) -> Result | None:
        """How the run ended, if it has."""
        values = self._read_json(RESULT)
        try:
            return None if values is None else Result(**values)
        except TypeError as error:
            raise damaged(self.path / RESULT, "it is not how a run ended") from error

    def save_result(self, result: Result) -> None:
        """The run has ended."""
        self._write_json(RESULT, asdict(result))

    def forget_result(self) -> None:
        """The run goes on after all."""
        (self.path / RESULT).unlink(missing_ok=True)

    def checkpoint(self) -> dict[str, Any] | None:
        """What was saved to go on from; None at the start."""
        path = self.path / CHECKPOINT
        if not path.exists():
            return None
        try:
            state = torch.load(path, weights_only=True)
        except OSError:
            raise
        except Exception as error:  # of any kind: it depends on where the file was cut
            raise damaged(path, "torch cannot load it") from error
        if not isinstance(state, dict):
            raise damaged(path, "it does not fit the run")
        return state

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Save what is needed to go on from here, after all lines up to here."""
        if self._metrics is not None:
            self._metrics.flush()
            os.fsync(self._metrics.fileno())
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_whole(self.path / CHECKPOINT, buffer.getvalue())

    def forget_checkpoint(self) -> None:
        """The run cannot go on any more, and the space is free."""
        (self.path / CHECKPOINT).unlink(missing_ok=True)

    def lines(self, update: int) -> list[Line]:
        """The lines up to an update."""
        return [line for line in read_lines(self.path) if line["update"] <= update]

    def keep_lines(self, lines: list[Line]) -> None:
        """Drop all others, and what a process that died wrote of another."""
        text = "".join(as_json(line) + "\n" for line in lines)
        self.close()
        write_whole(self.path / METRICS, text.encode())

    def append(self, line: Line) -> None:
        """Write a line, at once."""
        if self._metrics is None:
            self._metrics = open(self.path / METRICS, "a", encoding="utf-8")  # noqa: SIM115
        self._metrics.write(as_json(line) + "\n")
        self._metrics.flush()

    def close(self) -> None:
        """Let go of the file of lines."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def _read_json(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise damaged(path, str(error)) from error
        if not isinstance(values, dict):
            raise damaged(path, "it is not a JSON object")
        return values

    def _write_json(self, name: str, values: dict[str, Any]) -> None:
        text = json.dumps(values, indent=2, allow_nan=False) + "\n"
        write_whole(self.path / name, text.encode())


@dataclass(frozen=True)
class Run:
    """A run as it was recorded, to look at. See :func:`read_run`.

    Attributes:
        path: of its folder.
        config: what was asked of it last.
        recorded: its lines, if they are known; otherwise they are read when they are asked for,
            because a search has many runs, each of tens of thousands.
        result: how it ended; None if it has not.
    """

    path: Path
    config: Config
    recorded: list[Line] | None
    result: Result | None

    @cached_property
    def lines(self) -> list[Line]:
        """All of its lines."""
        return list(read_lines(self.path)) if self.recorded is None else self.recorded

    @property
    def standing(self) -> Result:
        """How it ended, or where it stands: "stopped" if there is more to do."""
        return where(self.lines, "stopped") if self.result is None else self.result

    def as_asked(self, asked: Config) -> Run:
        """The same run as far as a budget goes, which may end before the recorded one does.

        It has no result if it has not come so far.
        """
        config = replace(self.config, **{key: getattr(asked, key) for key in BUDGET})
        if config == self.config:
            return self
        end = self.standing
        if not config.spent(end.update, end.seconds):
            return replace(self, config=config, result=end if end.status == "diverged" else None)
        # As a run of that budget: with the update that ends it, which overshoots its seconds.
        spent = (
            place
            for place, line in enumerate(self.lines, 1)
            if config.spent(line["update"], line["seconds"])
        )
        cut = next(spent, len(self.lines))
        lines = self.lines[:cut]
        whole = self.result is not None and cut == len(self.lines)
        result = self.result if whole else where(lines, "finished")
        return replace(self, config=config, recorded=lines, result=result)

    def curve(self, value: str, against: str = "update") -> tuple[list[float], list[float]]:
        """What was recorded of a value: where, and how much, for the lines that have it.

        Args:
            value: a key of the lines, such as "loss", "averaged_loss" or "batch_loss".
            against: "update" or "seconds".
        """
        points = [
            (each[against], each[value]) for each in self.lines if each.get(value) is not None
        ]
        return [float(x) for x, _ in points], [float(y) for _, y in points]


def read_run(path: str | Path) -> Run:
    """A recorded run, also one that is at work now.

    Raises:
        ExperimentError: if there is none in that folder.
    """
    folder = Folder(path)
    config = folder.saved_config()
    if config is None:
        raise ExperimentError(f"{path} is not the folder of a run: it has no {CONFIG}.")
    return Run(folder.path, config, None, folder.result())


def read_runs(path: str | Path) -> list[Run]:
    """All runs below a folder, by path."""
    return [read_run(each.parent) for each in sorted(Path(path).glob(f"**/{CONFIG}"))]


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a run's metrics, up to the last if that is not whole.

    Raises:
        ExperimentError: if a whole line is not one of a run.
    """
    with suppress(FileNotFoundError), open(path / METRICS, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # a process died here, or is writing it now
            yield _line(line, number, path)


def _line(text: bytes, number: int, path: Path) -> Line:
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    if not isinstance(line, dict) or not {"update", "seconds"} <= set(line):
        raise damaged(path / METRICS, f"line {number} is not one of a run")
    return line


def where(lines: list[Line], status: str) -> Result:
    """Where lines end, as a result."""
    last: Line = lines[-1] if lines else {"update": 0, "seconds": 0.0}
    evaluated = next((line for line in reversed(lines) if "loss" in line), {})
    return Result(
        status,
        last["update"],
        last["seconds"],
        evaluated.get("loss"),
        evaluated.get("averaged_loss"),
    )


def damaged(path: Path, what: str) -> ExperimentError:
    """An error that names a file of a run, and says what can be done about it."""
    return ExperimentError(f"{path} cannot be read: {what}. {REMEDIES[path.name]}")


def versions() -> dict[str, str]:
    """What a run is run with."""
    return {
        "gaussnewton": gaussnewton.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _lock(file: IO[str], path: Path) -> None:
    """Claim a folder by its lock file, where the operating system can."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BusyError(f"another process is at work in {path}.") from error
