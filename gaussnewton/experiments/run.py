"""A run: train a problem by a method into a folder, to the end of a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from gaussnewton.errors import ExperimentError, FactorisationError, NonFiniteError
from gaussnewton.experiments.config import Config
from gaussnewton.experiments.problems import Data
from gaussnewton.experiments.record import Folder, Line, Result, read_run
from gaussnewton.experiments.stopping import stopping
from gaussnewton.experiments.training import Training, due


class Watcher:
    """Who is shown how a run goes. This one does not look."""

    def known(self, config: Config, result: Result) -> None:
        """It had ended before, and there is nothing to do."""

    def begin(self, config: Config, update: int, seconds: float) -> None:
        """It starts, or goes on from an update."""

    def line(self, line: Line) -> None:
        """There is a new line."""

    def end(self, result: Result) -> None:
        """It ended, or was stopped."""


def train(
    config: Config,
    folder: str | Path,
    *,
    data: Callable[[], Data] | None = None,
    save_every: float = 60.0,
    keep_checkpoint: bool = True,
    watcher: Watcher | None = None,
) -> Result:
    """Train, and record it in a folder, or go on with what is recorded there.

    A run that was stopped or killed goes on from its last checkpoint, bit for bit. One that has
    ended is not repeated. With a larger budget it goes on, with a smaller one it is refused.
    Ctrl-C stops it after the present update, with everything saved.

    Args:
        config: what to do; see :func:`~gaussnewton.experiments.config.configure`.
        folder: of this run alone.
        data: reads the problem's data, when there is something to do; by default from the folder
            of ``GAUSSNEWTON_DATA``, or from the network.
        save_every: seconds between checkpoints. 0 saves after each update.
        keep_checkpoint: keep the last one when the run has ended. Without it the parameters are
            gone, and going on with a larger budget means starting again.
        watcher: is shown how it goes.

    Raises:
        ExperimentError: if the folder belongs to another run.

    Example:
        >>> import tempfile
        >>> from gaussnewton.experiments.config import configure
        >>> from gaussnewton.experiments.run import train
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = train(configure("tiny", "default", updates=3), folder)
        >>> result.status, result.update
        ('finished', 3)
    """
    files, watcher = Folder(folder), watcher or Watcher()
    done = _ended(config, files)
    if done is not None:
        watcher.known(config, done)
        return done
    # Before anything is written: what is asked may turn out to be impossible.
    read = _read(config, data)
    with files.claimed():
        done = _ended(config, files)  # another process may have been faster
        if done is not None:
            watcher.known(config, done)
            return done
        files.save_config(config)
        files.save_versions()
        files.forget_result()
        with _torch_as_asked(config):
            return _train(config, files, read, save_every, keep_checkpoint, watcher)


def _ended(config: Config, files: Folder) -> Result | None:
    """The result of a run that has done what is asked; raises if the folder is another's."""
    saved, result = files.saved_config(), files.result()
    if saved is None:
        return None
    other = config.differences(saved)
    if other:
        raise ExperimentError(
            f"{files.path} holds another run: {', '.join(other)}. "
            "Name another folder, or delete this one."
        )
    if config.ends_before(saved):
        raise ExperimentError(
            f"{files.path} holds this run with a larger budget: {_budget(saved)}. "
            "Name another folder, or ask for that much or more."
        )
    ended = result is not None and (result.status == "diverged" or _met(config, result))
    return result if ended else None


def _read(config: Config, data: Callable[[], Data] | None) -> Data:
    read = config.the_problem().data(None) if data is None else data()
    if config.batch > len(read[0]):
        raise ExperimentError(
            f"batches of {config.batch} cannot be taken from the {len(read[0])} data of "
            f"{config.problem}."
        )
    return read


def _met(config: Config, result: Result) -> bool:
    return config.spent(result.update, result.seconds)


def _budget(config: Config) -> str:
    parts = [f"{config.updates} updates" if config.updates else ""]
    parts += [f"{config.seconds:g} seconds" if config.seconds else ""]
    return " or ".join(part for part in parts if part)


@contextmanager
def _torch_as_asked(config: Config) -> Iterator[None]:
    """Torch's threads and random state are the run's inside, and as they were after it."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        torch.set_num_threads(config.threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _train(
    config: Config,
    files: Folder,
    data: Data,
    save_every: float,
    keep_checkpoint: bool,
    watcher: Watcher,
) -> Result:
    training = _at_its_place(config, files, data)
    watcher.begin(config, training.update, training.seconds)
    reason = None
    with stopping() as stop:
        saved = time.monotonic()
        while not config.spent(training.update, training.seconds):
            if stop.asked:
                files.save_checkpoint(training.state_dict())
                return _end(files, "stopped", None, watcher)
            line, reason = _next_line(training, config)
            files.append(line)
            watcher.line(line)
            if reason:
                break
            if time.monotonic() - saved >= save_every:
                files.save_checkpoint(training.state_dict())
                saved = time.monotonic()
        if reason or not keep_checkpoint:
            files.forget_checkpoint()
        else:
            files.save_checkpoint(training.state_dict())
        return _end(files, "diverged" if reason else "finished", reason, watcher)


def _at_its_place(config: Config, files: Folder, data: Data) -> Training:
    """A new training, or the one that was saved; the lines end where it does."""
    training = Training(config, data)
    state = files.checkpoint()
    if state is None:
        files.keep_lines(-1)
        files.append(training.start() | training.evaluate())
    else:
        training.load_state_dict(state)
        files.keep_lines(training.update)
    return training


def _next_line(training: Training, config: Config) -> tuple[Line, str | None]:
    """Take an update, and evaluate where it is due; also says why it diverged, if it did."""
    try:
        line = training.step()
    except (NonFiniteError, FactorisationError) as error:
        return _no_update(training), str(error)
    except RuntimeError as error:  # so torch's optimisers say that a step is too long for a number
        if "overflow" not in str(error):
            raise
        return _no_update(training), str(error)
    last = config.spent(training.update, training.seconds)
    # A method with curvature takes back what made its loss not finite, or gives up by itself.
    guarded = training.method.second_order and not last
    if not math.isfinite(line["batch_loss"]) and not guarded:
        return line, "the loss of a batch is not finite"
    if last or due(training.update):
        line |= training.evaluate()
        if not math.isfinite(line["loss"]) and not guarded:
            return line, "the loss of the training data is not finite"
    return line, None


def _no_update(training: Training) -> Line:
    return {"update": training.update + 1, "seconds": training.seconds, "batch_loss": None}


def _end(files: Folder, status: str, reason: str | None, watcher: Watcher) -> Result:
    files.close()
    result = replace(standing(files.path), status=status, reason=reason)
    if status != "stopped":
        files.save_result(result)
    watcher.end(result)
    return result


def standing(path: str | Path) -> Result:
    """How a recorded run ended, or where it stands: "stopped" if there is more to do.

    Raises:
        ExperimentError: if there is no run in that folder.
    """
    run = read_run(path)
    if run.result is not None:
        return run.result
    last: Line = run.lines[-1] if run.lines else {"update": 0, "seconds": 0.0}
    evaluated = next((line for line in reversed(run.lines) if "loss" in line), {})
    return Result(
        "stopped",
        last["update"],
        last["seconds"],
        evaluated.get("loss"),
        evaluated.get("averaged_loss"),
    )
