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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

import gaussnewton
from gaussnewton.errors import BusyError, ExperimentError
from gaussnewton.experiments.config import Config
from gaussnewton.experiments.writing import clear_parts, write_whole

CONFIG, METRICS, CHECKPOINT = "config.json", "metrics.jsonl", "checkpoint.pt"
RESULT, VERSIONS, LOCK = "result.json", "versions.json", ".lock"

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
        return None if values is None else Result(**values)

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
        return torch.load(path, weights_only=True)

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

    def keep_lines(self, update: int) -> None:
        """Drop the lines after an update, and what a process that died wrote of another."""
        kept = [line for line in read_lines(self.path) if line["update"] <= update]
        text = "".join(as_json(line) + "\n" for line in kept)
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
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ExperimentError(f"{path} cannot be read: {error}.") from error

    def _write_json(self, name: str, values: dict[str, Any]) -> None:
        text = json.dumps(values, indent=2, allow_nan=False) + "\n"
        write_whole(self.path / name, text.encode())


@dataclass(frozen=True)
class Run:
    """A run as it was recorded, to look at. See :func:`read_run`."""

    path: Path
    config: Config
    lines: list[Line]
    result: Result | None

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
    return Run(folder.path, config, list(read_lines(folder.path)), folder.result())


def read_runs(path: str | Path) -> list[Run]:
    """All runs below a folder, by path."""
    return [read_run(each.parent) for each in sorted(Path(path).glob(f"**/{CONFIG}"))]


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a run's metrics, up to the first that is not whole."""
    try:
        text = (path / METRICS).read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            return  # a process died here, or is writing it now
        yield json.loads(line)


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
