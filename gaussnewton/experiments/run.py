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
from gaussnewton.experiments.record import CHECKPOINT, Folder, Line, Result, damaged, read_run
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

    A run that was stopped or killed goes on from its last checkpoint, bit for bit, and so does one
    that has ended, if it has not come to the end that is asked for now. One that has come there, or
    further, is left as it is, and its result is that of all that is recorded;
    :meth:`Run.as_asked <gaussnewton.experiments.record.Run.as_asked>` cuts it. Ctrl-C stops a run
    after the present update, with everything saved.

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
        ExperimentError: if the folder belongs to another run, or a file of it is damaged.

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
        with torch_as_asked(config):
            training = _begun(config, files, read)
            return _train(training, config, files, save_every, keep_checkpoint, watcher)


def _ended(config: Config, files: Folder) -> Result | None:
    """The result of a run that has come as far as asked; raises if the folder is another's."""
    saved = files.saved_config()
    if saved is None:
        return None
    other = config.differences(saved)
    if other:
        raise ExperimentError(
            f"{files.path} holds another run: {', '.join(other)}. "
            "Name another folder, or delete this one."
        )
    run = read_run(files.path)
    if run.result is None and config.same_budget(saved):
        return None  # it was stopped before its end, or killed there before all was saved
    found = run.standing
    if found.status == "diverged":
        return found
    # Also one that was stopped, on its way to somewhere else, may have passed what is asked.
    reached = config.spent(found.update, found.seconds)
    return replace(found, status="finished") if reached else None


def _read(config: Config, data: Callable[[], Data] | None) -> Data:
    read = config.the_problem().data(None) if data is None else data()
    if config.batch > len(read[0]):
        raise ExperimentError(
            f"batches of {config.batch} cannot be taken from the {len(read[0])} data of "
            f"{config.problem}."
        )
    return read


@contextmanager
def torch_as_asked(config: Config) -> Iterator[None]:
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
    training: Training,
    config: Config,
    files: Folder,
    save_every: float,
    keep_checkpoint: bool,
    watcher: Watcher,
) -> Result:
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
        kept = keep_checkpoint and not reason
        if kept:
            files.save_checkpoint(training.state_dict())
        result = _end(files, "diverged" if reason else "finished", reason, watcher)
        if not kept:  # only now: whoever dies in between must find one or the other
            files.forget_checkpoint()
        return result


def _begun(config: Config, files: Folder, data: Data) -> Training:
    """A new training, or the one that was saved; the lines end where it does."""
    # Before anything is written: what is there may be damaged.
    training, lines = _at_its_place(config, files, data)
    files.save_config(config)
    files.save_versions()
    files.forget_result()
    files.keep_lines(lines)
    if not lines and training.update == 0:
        files.append(training.start() | training.evaluate())
    return training


def _at_its_place(config: Config, files: Folder, data: Data) -> tuple[Training, list[Line]]:
    training = Training(config, data)
    state = files.checkpoint()
    if state is None:
        return training, []
    try:
        training.load_state_dict(state)
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise damaged(files.path / CHECKPOINT, "it does not fit the run") from error
    return training, files.lines(training.update)


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
    result = replace(read_run(files.path).standing, status=status, reason=reason)
    if status != "stopped":
        files.save_result(result)
    watcher.end(result)
    return result
