"""Alignment along a trajectory, recorded in a folder so that it goes on where it was stopped.

The folder is that of a run without its configuration, so that nobody takes it for one: a point a
line in ``metrics.jsonl``, and a ``checkpoint.pt``, which also says what was asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaussnewton.errors import ExperimentError
from gaussnewton.experiments.budget import Budget
from gaussnewton.experiments.config import Config, configure, with_threads_of
from gaussnewton.experiments.data import Batches
from gaussnewton.experiments.figures.alignment import Point, Trajectory
from gaussnewton.experiments.problems import Data, problem
from gaussnewton.experiments.record import Folder, Result, read_lines
from gaussnewton.experiments.run import Watcher, torch_as_asked
from gaussnewton.experiments.stopping import stopping

ALIGNED_AT = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
SMALL_BATCH = 250
"""Under a budget. The paper found no difference between 250 and 1000."""

SAVE_EVERY = 60.0
"""Seconds between checkpoints, where points are further apart."""


@dataclass(frozen=True)
class Aligning:
    """One problem's alignment: what is asked, and where it is recorded.

    Attributes:
        config: of the trajectory; seconds count comparisons too.
        marks: the updates after which steps are compared.
        folder: of this trajectory alone.
    """

    config: Config
    marks: Sequence[int]
    folder: Path

    def run(self, data: Callable[[], Data], watcher: Watcher) -> bool:
        """Follow the trajectory to the end of its budget, or on from where it was stopped.

        Every point is on disk as soon as it is measured. Ctrl-C stops it after the present update,
        and nothing is lost; a kill loses what came after the last checkpoint.

        Args:
            data: reads the problem's data, if there is something to do.
            watcher: is shown how it goes.

        Returns:
            Whether it came to its end; False after Ctrl-C.

        Raises:
            ExperimentError: if the folder holds another trajectory.
        """
        files = Folder(self.folder)
        with files.claimed(), torch_as_asked(self.config):
            state = self._state(files)
            if state is not None and self._over(state["update"], state["seconds"]):
                return True
            trajectory = self._at_its_place(files, state, data())
            watcher.begin(self.config, trajectory.update, trajectory.seconds)
            ended = self._follow(trajectory, files, watcher)
            status = "finished" if ended else "stopped"
            watcher.end(Result(status, trajectory.update, trajectory.seconds))
        return ended

    def points(self) -> list[Point]:
        """Those recorded within the budget: more may be there from a larger one.

        What began within the seconds is part of them, and the first point always is.
        """
        most = self.config.seconds
        return [
            point
            for place, point in enumerate(read_lines(self.folder))
            if place == 0 or most is None or point["began"] < most
        ]

    def _over(self, update: int, seconds: float) -> bool:
        return self.config.spent(update, seconds)

    def _state(self, files: Folder) -> dict[str, Any] | None:
        """Where to go on; None at the start. Raises if it is another trajectory's."""
        saved = files.checkpoint()
        if saved is None:
            return None
        other = self.config.differences(Config.from_dict(saved["config"], str(files.path)))
        if other:
            raise ExperimentError(
                f"{files.path} holds another alignment: {', '.join(other)}. "
                "Name another folder, or delete this one."
            )
        return saved["trajectory"]

    def _at_its_place(self, files: Folder, state: dict[str, Any] | None, data: Data) -> Trajectory:
        """A new trajectory, or the one that was saved; the points end where it does."""
        what, config = self.config.the_problem(), self.config
        batches = Batches(*data, config.batch, config.seed)
        trajectory = Trajectory(
            what.network(config.seed), what.criterion(), batches, seed=config.seed
        )
        if state is not None:
            trajectory.load_state_dict(state)
        files.keep_lines(files.lines(trajectory.update))
        return trajectory

    def _follow(self, trajectory: Trajectory, files: Folder, watcher: Watcher) -> bool:
        scale = self.config.the_problem().scale
        saved = time.monotonic()
        with stopping() as stop:
            while not stop.asked and not self._over(trajectory.update, trajectory.seconds):
                began = trajectory.seconds
                line = trajectory.step()
                watcher.line(line | {"batch_loss": scale * line["batch_loss"]})
                marked = trajectory.update in self.marks
                if marked:
                    point = trajectory.look()
                    files.append(point | {"began": began, "seconds": trajectory.seconds})
                if marked or time.monotonic() - saved >= SAVE_EVERY:
                    self._save(trajectory, files)
                    saved = time.monotonic()
            self._save(trajectory, files)
            return not stop.asked

    def _save(self, trajectory: Trajectory, files: Folder) -> None:
        files.save_checkpoint(
            {"config": self.config.as_dict(), "trajectory": trajectory.state_dict()}
        )


def aligning(
    name: str, budget: Budget, parent: Path, *, seed: int = 0, threads: int | None = None
) -> Aligning:
    """What a budget asks of a problem's alignment.

    Args:
        name: of the problem.
        budget: of updates, or of seconds; the paper's updates are never exceeded by the clock.
        parent: each trajectory has its folder below.
        seed: of the network, the batches and KFAC's draws.
        threads: of torch; by default its own choice, or that of the one that goes on.

    Example:
        >>> import pathlib
        >>> from gaussnewton.experiments.aligning import aligning
        >>> from gaussnewton.experiments.budget import Budget
        >>> found = aligning("faces", Budget(), pathlib.Path("runs"))
        >>> found.marks[-3:], found.folder.name
        ([3000, 10000, 20000], 'faces,batch=1000')
        >>> aligning("mnist", Budget(updates=50), pathlib.Path("runs"), seed=2).folder.name
        'mnist,batch=250,updates=50,seed=2'
    """
    what = problem(name)
    batch = what.batch if budget.full else min(what.batch, SMALL_BATCH)
    most = budget.updates or what.second_order_updates
    config = configure(
        name, "kfra", seed=seed, batch=batch, threads=threads, updates=most, seconds=budget.seconds
    )
    # A mark takes a batch, so that trajectories with other marks are not the same ones.
    parts = [name, f"batch={batch}", f"updates={budget.updates}" if budget.updates else ""]
    parts += [f"seed={seed}" if seed else ""]
    folder = parent / ",".join(part for part in parts if part)
    if threads is None:
        config = _with_saved_threads(config, folder)
    return Aligning(config, sorted({t for t in ALIGNED_AT if t < most} | {most}), folder)


def _with_saved_threads(config: Config, folder: Path) -> Config:
    saved = Folder(folder).checkpoint()
    if saved is None:
        return config
    return with_threads_of(config, Config.from_dict(saved["config"], str(folder)))
