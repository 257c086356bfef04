"""Runs: what they record, how they end, and that they go on bit for bit."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from gaussnewton.errors import BusyError, ExperimentError
from gaussnewton.experiments.config import Config, configure
from gaussnewton.experiments.problems import Data, problem
from gaussnewton.experiments.record import Folder, Line, Result, read_run
from gaussnewton.experiments.run import Watcher, train
from gaussnewton.experiments.training import Training, due
from gaussnewton.experiments.writing import write_whole

FILES = {"config.json", "metrics.jsonl", "checkpoint.pt", "versions.json", "result.json", ".lock"}


def asked(method: str = "default", **changes: Any) -> Config:
    return configure("tiny", method, **({"updates": 6, "threads": 1} | changes))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(folder: Path) -> list[dict[str, Any]]:
    return [{key: v for key, v in line.items() if key != "seconds"} for line in lines(folder)]


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


def assert_same_run(one: Path, other: Path) -> None:
    assert untimed(one) == untimed(other)
    theirs = parameters(other)
    for name, value in parameters(one).items():
        assert torch.equal(value, theirs[name]), name


class StopAfter(Watcher):
    """Presses Ctrl-C during an update."""

    def __init__(self, update: int) -> None:
        self.update = update

    def line(self, line: Line) -> None:
        if line["update"] == self.update:
            signal.raise_signal(signal.SIGINT)


def never() -> Data:
    raise AssertionError("the data of a run that has ended are not needed")


def test_a_run_is_what_a_plain_loop_does(tmp_path: Path) -> None:
    result = train(asked("adam:rate=0.01,decay=4"), tmp_path)
    tiny = problem("tiny")
    x, _ = tiny.data(None)
    model = tiny.network(0)
    order = torch.randperm(1000, generator=(g := torch.Generator().manual_seed(0)))
    order = torch.cat([order, torch.randperm(1000, generator=g)])
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for t in range(6):
        batch = x[order[250 * t : 250 * (t + 1)]]
        optimizer.param_groups[0]["lr"] = 0.01 if t < 4 else 0.005
        optimizer.zero_grad()
        bce = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch)
        (196 * bce).backward()
        optimizer.step()
        losses.append(196 * bce.item())
    recorded = lines(tmp_path)
    assert [line["update"] for line in recorded] == list(range(7))
    assert [line["batch_loss"] for line in recorded[1:]] == pytest.approx(losses, rel=1e-6)
    assert [line["rate"] for line in recorded[1:]] == [0.01] * 4 + [0.005] * 2
    with torch.no_grad():
        final = 196 * torch.nn.functional.binary_cross_entropy_with_logits(model(x), x).item()
    assert result.loss == pytest.approx(final, rel=1e-6)
    assert result.averaged_loss is None
    for name, value in parameters(tmp_path).items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-7)


def test_what_is_recorded(tmp_path: Path) -> None:
    random_state, threads = torch.get_rng_state(), torch.get_num_threads()
    result = train(asked(seed=2, updates=5, dtype="float64"), tmp_path / "deep" / "run")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.get_num_threads() == threads
    folder = tmp_path / "deep" / "run"
    assert {path.name for path in folder.iterdir()} == FILES
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "problem": "tiny",
        "method": "default",
        "seed": 2,
        "batch": 250,
        "dtype": "float64",
        "threads": 1,
        "updates": 5,
        "seconds": None,
        "format": 1,
    }
    assert parameters(folder)["0.weight"].dtype == torch.float64
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["torch"] == torch.__version__
    last = lines(folder)[-1]
    assert {"tau", "gamma", "alpha", "momentum", "rho", "loss", "averaged_loss"} <= set(last)
    assert last["loss"] < 0.5 * lines(folder)[0]["loss"]
    assert (result.loss, result.averaged_loss) == (last["loss"], last["averaged_loss"])
    assert result.loss != result.averaged_loss
    seconds = [line["seconds"] for line in lines(folder)]
    assert seconds == sorted(seconds)
    run = read_run(folder)
    assert run.curve("averaged_loss", "seconds") == (
        seconds,
        [line["averaged_loss"] for line in lines(folder)],
    )


def test_averaged_loss_is_that_of_averaged_parameters(tmp_path: Path) -> None:
    result = train(asked("kfra", updates=3), tmp_path)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["optimizer"]["state"]
    model = problem("tiny").network(0)
    x, _ = problem("tiny").data(None)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(state[i]["average"])
        value = 196 * torch.nn.BCEWithLogitsLoss()(model(x), x).item()
    assert result.averaged_loss == pytest.approx(value, rel=1e-5)


def test_evaluation_is_even_on_a_logarithmic_axis() -> None:
    marks = [t for t in range(100_001) if due(t)]
    assert marks[:13] == [*range(11), 12, 14]
    assert {1000, 10_000, 100_000} <= set(marks)
    assert 999 not in marks
    for decade in (100, 1000, 10_000):
        between = [t for t in marks if decade <= t < 10 * decade]
        assert len(between) == 16
        assert max(b / a for a, b in pairwise(between)) <= 1.25 + 1e-9


@pytest.mark.parametrize(
    ("method", "stop"),
    [("default", 3), ("default", 4), ("kfra", 4), ("kfac-ma", 4), ("adam:decay=2", 3)],
)
def test_ctrl_c_saves_and_the_run_goes_on_bit_for_bit(
    method: str, stop: int, tmp_path: Path
) -> None:
    config = asked(method)
    train(config, tmp_path / "whole")
    torch.manual_seed(99)  # what others draw does not matter
    result = train(config, tmp_path / "parts", watcher=StopAfter(stop))
    assert (result.status, result.update) == ("stopped", stop)
    assert not (tmp_path / "parts" / "result.json").exists()
    torch.manual_seed(98)
    result = train(config, tmp_path / "parts")
    assert (result.status, result.update) == ("finished", 6)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


KILLED = """
import os, signal, sys
from gaussnewton.experiments.config import configure
from gaussnewton.experiments.run import Watcher, train

class Kill(Watcher):
    def line(self, line):
        if line["update"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)

config = configure("tiny", "default", updates=8, threads=1)
train(config, sys.argv[1], save_every=0.0, watcher=Kill())
"""


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The process is killed after a line was written, and before its checkpoint."""
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / ".checkpoint.pt.1.part").write_bytes(b"left by an earlier one")
    process = subprocess.run([sys.executable, "-c", KILLED, str(folder)])
    assert process.returncode == -signal.SIGKILL
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert (state["update"], lines(folder)[-1]["update"]) == (4, 5)
    assert not (folder / "result.json").exists()
    # As if it had come further, in the middle of a line.
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"update": 6, "seconds": 0.5, "batch_loss": -1.0}\n{"update": 7')
    config = asked(updates=8)
    assert train(config, folder).status == "finished"
    train(config, tmp_path / "whole")
    assert_same_run(folder, tmp_path / "whole")
    assert {path.name for path in folder.iterdir()} == FILES


def test_a_file_is_the_old_one_until_it_is_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    seen = []

    def crash(_: str | Path, __: str | Path) -> None:
        seen.append(path.read_bytes())
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new")
    assert seen == [b"old"]
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    first = train(asked("adam"), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert train(asked("adam"), tmp_path, data=never) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_larger_budget_goes_on(tmp_path: Path) -> None:
    train(asked("adam", updates=20), tmp_path / "parts")
    train(asked("adam", updates=25), tmp_path / "parts")
    train(asked("adam", updates=25), tmp_path / "whole")
    # 20 and 25 are evaluated in both: one as a mark, one as the end.
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_that_went_further_than_asked_is_left_as_it_is(tmp_path: Path) -> None:
    result = train(asked("adam", updates=25), tmp_path)
    before = contents(tmp_path)
    for budget in ({"updates": 24}, {"updates": None, "seconds": result.seconds / 2}):
        assert train(asked("adam", **budget), tmp_path, data=never) == result
    assert contents(tmp_path) == before


def test_a_budget_of_the_other_kind_is_compared_with_what_was_done(tmp_path: Path) -> None:
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    clock = asked("adam", updates=None, seconds=0.01)
    first = train(clock, parts)
    more = asked("adam", updates=first.update + 3)
    assert train(more, parts).update == first.update + 3
    train(more, whole)
    # Where the first budget ended it was evaluated, though that is not a mark.
    ours, theirs = untimed(parts), untimed(whole)
    assert [line["batch_loss"] for line in ours[1:]] == [line["batch_loss"] for line in theirs[1:]]
    assert all(torch.equal(v, parameters(whole)[k]) for k, v in parameters(parts).items())
    assert train(clock, parts, data=never).update == first.update + 3
    longer = asked("adam", updates=None, seconds=2 * lines(parts)[-1]["seconds"])
    assert train(longer, parts).update > first.update + 3


def test_a_stopped_run_may_have_passed_what_is_asked(tmp_path: Path) -> None:
    train(asked(updates=8), tmp_path / "parts", watcher=StopAfter(5))
    before = contents(tmp_path / "parts")
    result = train(asked(updates=4), tmp_path / "parts", data=never)
    assert (result.status, result.update) == ("finished", 5)
    assert contents(tmp_path / "parts") == before
    for updates in (6, 8):  # it goes on to less than was asked first, and then to that
        result = train(asked(updates=updates), tmp_path / "parts")
        assert (result.status, result.update) == ("finished", updates)
    train(asked(updates=8), tmp_path / "whole")
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_run_is_cut_to_what_is_asked(tmp_path: Path) -> None:
    train(asked("adam", updates=12), tmp_path)
    run = read_run(tmp_path)
    assert run.as_asked(asked("adam", updates=12)) is run
    cut = run.as_asked(asked("adam", updates=11))
    assert cut.lines == run.lines[:12]
    assert cut.config.updates == 11
    assert cut.result is not None
    assert (cut.result.status, cut.result.update) == ("finished", 11)
    assert cut.result.loss == run.lines[10]["loss"]  # 11 is no mark
    by_clock = asked("adam", updates=None, seconds=run.lines[3]["seconds"])
    assert run.as_asked(by_clock).lines == run.lines[:4]
    assert run.as_asked(asked("adam", updates=13)).result is None


def test_the_checkpoint_is_forgotten_when_the_result_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(
        Folder, "forget_checkpoint", lambda self: found.append((self.path / "result.json").exists())
    )
    train(asked("adam"), tmp_path / "ended", keep_checkpoint=False)
    train(asked("sgd:rate=1e38"), tmp_path / "diverged")
    assert found == [True, True]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed": 1}, "seed 0 instead of 1"),
        ({"batch": 100}, "batch 250 instead of 100"),
        ({"method": "adam"}, "method default instead of adam"),
        ({"dtype": "float64"}, "dtype float32 instead of float64"),
        ({"threads": 2}, "threads 1 instead of 2"),
    ],
)
def test_another_runs_folder_is_refused(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    Folder(tmp_path).save_config(asked())
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ExperimentError, match=f"holds another run: {sentence}"):
        train(asked(**changes), tmp_path, data=never)
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_damaged_or_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ExperimentError, match=r"config\.json cannot be read"):
        train(asked(), tmp_path)
    (tmp_path / "config.json").write_text('{"format": 99}')
    with pytest.raises(ExperimentError, match="not the configuration of a run of this version"):
        train(asked(), tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    with pytest.raises(ExperimentError, match="not the folder of a run"):
        train(asked(), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize("cut", [0, 1, 0.5, -1])
def test_a_cut_checkpoint_is_refused(cut: float, tmp_path: Path) -> None:
    train(asked("adam"), tmp_path)
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(cut * len(whole)) if cut == 0.5 else int(cut)])
    before = contents(tmp_path)
    with pytest.raises(
        ExperimentError, match=r"checkpoint\.pt cannot be read.* Delete it to start"
    ):
        train(asked("adam", updates=9), tmp_path)
    assert contents(tmp_path) == before
    path.unlink()
    assert train(asked("adam", updates=9), tmp_path).update == 9


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    train(asked("adam"), tmp_path)
    for state in ({}, [1], {"update": 1, "seconds": 0.1, "model": {}}):
        torch.save(state, tmp_path / "checkpoint.pt")
        with pytest.raises(ExperimentError, match=r"checkpoint\.pt .* does not fit the run"):
            train(asked("adam", updates=9), tmp_path)


@pytest.mark.parametrize("line", ['{"update": 2, "sec', "\0\0", "[1]", "{}", "\udcff"])
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    train(asked("adam"), tmp_path)
    path = tmp_path / "metrics.jsonl"
    recorded = path.read_text().splitlines()
    recorded[2] = line
    path.write_text("\n".join(recorded) + "\n", errors="surrogateescape")
    before = contents(tmp_path)
    sentence = r"metrics\.jsonl cannot be read: line 3 is not one of a run\. Delete that line"
    with pytest.raises(ExperimentError, match=sentence):
        train(asked("adam", updates=9), tmp_path)
    with pytest.raises(ExperimentError, match=sentence):
        read_run(tmp_path).curve("loss")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["config.json", "result.json", "versions.json"])
@pytest.mark.parametrize("text", ["", '{"a"', "[1]", '{"a": 1}', "\udcff"])
def test_damaged_files_are_named(name: str, text: str, tmp_path: Path) -> None:
    if (name, text) == ("versions.json", '{"a": 1}'):
        return  # whatever is noted there
    train(asked("adam"), tmp_path)
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(ExperimentError, match=name.replace(".", r"\.")):
        train(asked("adam", updates=9), tmp_path)


def test_a_folder_in_work_is_refused(tmp_path: Path) -> None:
    with Folder(tmp_path).claimed(), pytest.raises(BusyError, match="another process"):
        train(asked(), tmp_path)
    assert train(asked("sgd"), tmp_path).status == "finished"


def test_the_budget_in_seconds_counts_updates_only(tmp_path: Path) -> None:
    def slow_to_read() -> Data:
        time.sleep(0.3)
        return problem("tiny").data(None)

    result = train(asked("adam", updates=None, seconds=0.1), tmp_path, data=slow_to_read)
    recorded = lines(tmp_path)
    assert result.update > 2  # reading the data alone took longer
    assert recorded[-2]["seconds"] < 0.1 <= recorded[-1]["seconds"] == result.seconds
    assert "loss" in recorded[-1]


def test_evaluation_takes_no_training_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate, naps = Training.evaluate, []

    def slowly(training: Training) -> Line:
        naps.append(training.update)
        time.sleep(0.1)
        return evaluate(training)

    monkeypatch.setattr(Training, "evaluate", slowly)
    result = train(asked("adam"), tmp_path)
    assert naps == list(range(7))
    assert result.seconds < 0.1 * len(naps)


@pytest.mark.parametrize("method", ["sgd:rate=1e38", "adam:rate=1e37"])
def test_a_diverging_run_is_ended_and_recorded(method: str, tmp_path: Path) -> None:
    result = train(asked(method, updates=50), tmp_path)
    assert result.status == "diverged"
    assert result.update < 50
    assert result.score == math.inf
    assert result.reason is not None
    assert "not finite" in result.reason
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert train(asked(method, updates=50), tmp_path, data=never) == result
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_method_with_curvature_that_gives_up_is_recorded(tmp_path: Path) -> None:
    def holes() -> Data:
        x = torch.rand(500, 196)
        x[:, 0] = math.nan
        return x, None

    result = train(asked("kfra", updates=50), tmp_path, data=holes)
    assert result.status == "diverged"
    assert result.reason is not None
    assert "in a row" in result.reason
    assert lines(tmp_path)[-1]["batch_loss"] is None


def test_a_skipped_step_has_no_numbers_of_the_one_before(tmp_path: Path) -> None:
    """And so the lines are the same where a run goes on just before it."""

    def one_hole() -> Data:
        x = torch.rand(500, 196)
        x[0] = math.nan  # in one of the two batches of each epoch
        return x, None

    config = asked(updates=5)
    torch.manual_seed(0)
    train(config, tmp_path / "whole", data=one_hole)
    whole = untimed(tmp_path / "whole")
    skipped = [line for line in whole[1:] if line["batch_loss"] is None]
    assert len(skipped) in (2, 3)
    assert not any("alpha" in line for line in skipped)
    assert sum("alpha" in line for line in whole) == 5 - len(skipped)
    for line in skipped:
        parts = tmp_path / str(line["update"])
        for watcher in (StopAfter(line["update"] - 1), None):
            torch.manual_seed(0)
            train(config, parts, data=one_hole, watcher=watcher)
        assert untimed(parts) == whole


def test_impossible_batches_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="batches of 1001 cannot be taken from the 1000"):
        train(asked(batch=1001), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"updates": 0}, "updates must be above zero"),
        ({"seconds": -1.0}, "seconds must be above zero"),
        ({"seed": -1}, "seed must be zero or more"),
        ({"dtype": "half"}, "dtype must be float32 or float64"),
        ({"threads": 0}, "threads must be above zero"),
        ({"threads": 99_999_999_999}, "threads must be at most 4096"),
        ({"seed": 2**63}, r"seed must be below 2\^63"),
    ],
)
def test_impossible_configurations(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ExperimentError, match=sentence):
        asked(**changes)


def test_the_largest_seed(tmp_path: Path) -> None:
    for method in ("kfac", "adam"):
        config = asked(method, seed=2**63 - 1, updates=1)
        assert train(config, tmp_path / method).status == "finished"


def test_a_run_in_a_thread_leaves_signals_alone(tmp_path: Path) -> None:
    results: list[Result] = []
    before = signal.getsignal(signal.SIGINT)  # a process in the background ignores it
    thread = threading.Thread(target=lambda: results.append(train(asked("adam"), tmp_path)))
    thread.start()
    thread.join()
    assert [result.status for result in results] == ["finished"]
    assert signal.getsignal(signal.SIGINT) is before


def test_other_versions_are_noted(tmp_path: Path) -> None:
    train(asked("adam", updates=2), tmp_path)
    path = tmp_path / "versions.json"
    older = json.loads(path.read_text()) | {"torch": "0.1"}
    path.write_text(json.dumps(older))
    train(asked("adam", updates=3), tmp_path)
    noted = json.loads(path.read_text())
    assert noted["torch"] == torch.__version__
    assert [each["torch"] for each in noted["history"]] == ["0.1", torch.__version__]


def test_evaluated_data_are_drawn_from_all() -> None:
    """Data may be sorted, as the faces are by person."""
    x = torch.arange(20_000.0).unsqueeze(1).expand(-1, 196) / 20_000
    seen = Training(asked("adam"), (x, None)).evaluated[0][:, 0]
    assert len(seen.unique()) == 5000
    assert seen.mean() == pytest.approx(0.5, abs=0.02)
    again = Training(asked("adam", seed=3), (x, None)).evaluated[0][:, 0]
    assert torch.equal(seen, again)
