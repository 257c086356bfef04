"""Alignment that is recorded on the way, and goes on from there."""

from __future__ import annotations

import io
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gaussnewton.errors import ExperimentError
from gaussnewton.experiments import aligning as module
from gaussnewton.experiments.aligning import aligning
from gaussnewton.experiments.budget import Budget
from gaussnewton.experiments.config import Config
from gaussnewton.experiments.figures import load
from gaussnewton.experiments.figures.alignment import Trajectory
from gaussnewton.experiments.live import Bar, Lines
from gaussnewton.experiments.problems import PROBLEMS
from gaussnewton.experiments.record import Line, read_lines, read_runs
from gaussnewton.experiments.reproduction import Reproduction
from gaussnewton.experiments.run import Watcher
from gaussnewton.experiments.stopping import Stopped

NARROW = replace(PROBLEMS["tiny"], sizes=(196, 12, 4, 12, 196), batch=50, second_order_updates=5)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROBLEMS, "tiny", NARROW)
    monkeypatch.setattr(module, "Trajectory", partial(Trajectory, max_iterations=5))
    monkeypatch.setattr("gaussnewton.experiments.figures.saving._DOTS_PER_INCH", 30)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


class StopsAt(Watcher):
    """Presses Ctrl-C, or pulls the plug, after an update."""

    def __init__(self, update: int, how: BaseException | None = None) -> None:
        self.update, self.how = update, how

    def line(self, line: Line) -> None:
        if line["update"] == self.update:
            if self.how is not None:
                raise self.how
            signal.raise_signal(signal.SIGINT)


def make(out: Path, budget: Budget = Budget(updates=5), **settings: Any) -> dict[str, Any]:  # noqa: B008
    Reproduction(out, budget, aligned=["tiny"], **{"threads": 1, **settings}).make("alignment")
    return load(out / "alignment-tiny.json")


class Taken(Watcher):
    """Where a run began, and its updates."""

    def __init__(self) -> None:
        self.began, self.updates = -1, []

    def begin(self, config: Config, update: int, seconds: float) -> None:  # noqa: ARG002
        self.began = update

    def line(self, line: Line) -> None:
        self.updates.append(line["update"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        return make(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("update", [1, 2, 3])
def test_stopped_and_resumed_is_as_if_it_had_not_been(
    update: int, whole: dict[str, Any], tmp_path: Path
) -> None:
    """By Ctrl-C after the first point, between two and at the second."""
    with pytest.raises(Stopped):
        make(tmp_path, watcher=StopsAt(update))
    part = load(tmp_path / "alignment-tiny.json")
    assert part["updates"] == [t for t in (1, 3) if t <= update]
    assert "asked" not in part
    taken = Taken()
    assert make(tmp_path, watcher=taken) == whole
    assert whole["updates"] == [1, 3, 5]
    assert taken.updates == list(range(update + 1, 6))  # nothing was done twice


def test_a_kill_loses_what_came_after_the_last_point(whole: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        make(tmp_path, watcher=StopsAt(5, SystemExit()))
    (folder,) = (tmp_path / "runs" / "alignment").iterdir()
    assert [point["update"] for point in read_lines(folder)] == [1, 3]
    with open(folder / "metrics.jsonl", "a") as file:  # killed between a point and its checkpoint
        file.write('{"update": 5, "began"')
    taken = Taken()
    assert make(tmp_path, watcher=taken) == whole
    assert (taken.began, taken.updates) == (3, [4, 5])


def test_there_are_checkpoints_between_far_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Any]
) -> None:
    monkeypatch.setattr(module, "SAVE_EVERY", 0.0)
    with pytest.raises(SystemExit):
        make(tmp_path, watcher=StopsAt(5, SystemExit()))
    taken = Taken()
    assert make(tmp_path, watcher=taken) == whole
    assert taken.updates == [5]


def test_a_recorded_trajectory_is_not_taken_for_a_run(tmp_path: Path) -> None:
    make(tmp_path, Budget(updates=1))
    assert read_runs(tmp_path / "runs") == []


def test_the_clock_ends_it_and_a_larger_budget_goes_on(tmp_path: Path) -> None:
    short = make(tmp_path, Budget(seconds=1e-3))
    assert short["updates"] == [1]
    taken = Taken()
    longer = make(tmp_path, Budget(seconds=1e3), watcher=taken)
    assert longer["updates"] == [1, 3, 5]  # and no more than the paper has
    assert taken.began == 1
    assert make(tmp_path, Budget(seconds=1e-3), watcher=Taken()) == short  # what is more is cut


def test_seconds_that_were_spent_are_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped and started again it does not get all of its time anew."""
    look = Trajectory.look

    def slow(self: Trajectory) -> dict[str, Any]:
        self.seconds += 100.0
        return look(self)

    monkeypatch.setattr(Trajectory, "look", slow)
    with pytest.raises(Stopped):
        make(tmp_path, Budget(seconds=150.0), watcher=StopsAt(2))
    taken = Taken()
    assert make(tmp_path, Budget(seconds=150.0), watcher=taken)["updates"] == [1, 3]
    assert taken.updates == [3]


def test_at_full_size_it_goes_as_far_as_the_paper() -> None:
    found = {name: aligning(name, Budget(), Path()) for name in ("mnist", "faces")}
    assert found["mnist"].marks[-2:] == [3000, 5000]
    assert found["faces"].marks[-2:] == [10_000, 20_000]
    assert {work.config.batch for work in found.values()} == {1000}
    assert aligning("faces", Budget(seconds=9.0), Path()).config.batch == 250


def test_each_trajectory_has_a_folder_of_its_own(tmp_path: Path) -> None:
    asked = [
        aligning("mnist", budget, tmp_path, seed=seed).folder
        for budget in (Budget(), Budget(seconds=9.0), Budget(updates=9), Budget(updates=8))
        for seed in (0, 1)
    ]
    assert len(set(asked)) == len(asked)


def test_threads_are_set_and_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    state = torch.get_rng_state()
    step = Trajectory.step

    def noted(self: Trajectory) -> Line:
        seen.append(torch.get_num_threads())
        return step(self)

    monkeypatch.setattr(Trajectory, "step", noted)
    before = torch.get_num_threads()
    other = before + 1
    result = make(tmp_path, Budget(updates=1), threads=other)
    assert seen == [other]
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert result["budget"].endswith(f", {other} threads")
    # What goes on has the same; to ask for others is another trajectory.
    assert (
        aligning("tiny", Budget(updates=1), tmp_path / "runs" / "alignment").config.threads == other
    )
    with pytest.raises(ExperimentError, match="holds another alignment: threads"):
        make(tmp_path, Budget(updates=1), threads=before)


def test_progress_is_shown(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, terminal = io.StringIO(), Terminal()
    make(tmp_path / "a", watcher=Lines(plain, every=0.0))
    said = plain.getvalue().splitlines()
    assert len(said) == 6
    assert said[0].startswith("alignment of tiny  KFRA: loss 1")  # in nats an image
    for part in ("5/5", "τ ", "γ ", "ρ "):
        assert part in said[4]
    assert said[-1].startswith("alignment of tiny  KFRA: finished after 5 updates")
    make(tmp_path / "b", watcher=Bar(terminal))
    assert "alignment of tiny  KFRA: loss" in terminal.getvalue()
