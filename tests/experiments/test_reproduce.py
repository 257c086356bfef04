"""The paper's figures, its claims and the page from one command each, on small networks."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gaussnewton as gn
from gaussnewton.cli import main
from gaussnewton.experiments import reproduction
from gaussnewton.experiments.budget import Budget
from gaussnewton.experiments.claims import CLAIMS
from gaussnewton.experiments.commands import claims as claims_command
from gaussnewton.experiments.config import configure
from gaussnewton.experiments.figures import FIGURES, load, progress
from gaussnewton.experiments.lineup import ADAM, AUTOENCODER, Entry, adam_lines, drawn, entries
from gaussnewton.experiments.problems import PROBLEMS
from gaussnewton.experiments.record import Result, Run, read_run
from gaussnewton.experiments.run import train

NARROW = replace(PROBLEMS["tiny"], sizes=(196, 12, 4, 12, 196), batch=50)


@pytest.fixture(autouse=True)
def _small_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("tiny", "curves", "faces", "mnist"):
        monkeypatch.setitem(PROBLEMS, name, replace(NARROW, name=name))

    def classes(folder: Any) -> tuple[Tensor, Tensor]:
        x, _ = NARROW.data(folder)
        return x, (x.sum(1) > x.sum(1).median()).float()

    mixture = replace(
        NARROW, name="mixture", sizes=(196, 12, 3), criterion=gn.BinaryMixtureLoss, data=classes,
        scale=1.0,
    )  # fmt: skip
    monkeypatch.setitem(PROBLEMS, "mixture", mixture)
    monkeypatch.setattr("gaussnewton.experiments.figures.saving._DOTS_PER_INCH", 30)
    monkeypatch.chdir(tmp_path)


def reproduce(*arguments: str) -> int:
    return main(["reproduce", *arguments, "--threads", "1"])


def test_a_figure_of_progress(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert reproduce("curves", "--updates", "4") == 0
    said = capsys.readouterr().out
    assert "curves: results/curves.png" in said
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        "curves.json", "curves.png", "curves.svg", "runs"
    }  # fmt: skip
    result = load(tmp_path / "results" / "curves.json")
    (panel,) = result["problems"]
    found = {(run["method"], run["setting"]): run for run in panel["runs"]}
    assert list(found) == [
        ("kfra", ""), ("kfra", "moving average"), ("kfac", ""), ("kfac", "moving average"),
        ("gaussnewton", ""), ("adam", "default"), ("adam", "tuned"),
    ]  # fmt: skip
    assert found["kfra", "moving average"]["style"] == "kfra dashed"
    assert all([p[0] for p in run["points"]] == [0, 1, 2, 3, 4] for run in found.values())
    assert "4 updates a method (full size: 200 updates with curvature" in result["budget"]
    caption = FIGURES["curves"].caption(result)
    assert "averaged parameters (appendix B.4)" in caption
    # At four updates the grid has eight rates and three periods of decay.
    assert "Tuned Adam is the best of 4 settings, 3 of the grid's 24." in caption
    assert found["adam", "tuned"]["tuned_of"] == 4

    assert reproduce("curves", "--updates", "4") == 0
    again = capsys.readouterr().out
    assert again.count("recorded before") == 9
    assert reproduce("curves", "--updates", "2") == 0  # what is there is more, and is cut
    cut = load(tmp_path / "results" / "curves.json")
    assert all(run["points"][-1][0] == 2 for run in cut["problems"][0]["runs"])
    assert "recorded before" in capsys.readouterr().out


def test_what_is_drawn_is_what_was_recorded(tmp_path: Path) -> None:
    reproduction.Reproduction(tmp_path, Budget(updates=2), threads=1).make("mixture")
    runs = load(tmp_path / "mixture.json")["problems"][0]["runs"]
    assert [run["method"] for run in runs] == ["kflr", "kfra", "kfac", "gaussnewton", *["adam"] * 2]
    lines = (tmp_path / "runs" / "mixture" / "kflr-ma" / "metrics.jsonl").read_text().splitlines()
    recorded = [json.loads(line) for line in lines]
    assert runs[0]["points"] == [
        [r["update"], r["seconds"], min(r["loss"], r["averaged_loss"])] for r in recorded
    ]


def test_the_grid_of_adam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduction, "entries", lambda _: AUTOENCODER[:1])
    assert reproduce("mnist", "--updates", "4", "--search") == 0
    result = load(tmp_path / "results" / "mnist.json")
    settings = [run["setting"] for run in result["problems"][0]["runs"]]
    assert settings == ["", "default", "tuned", "top 10", "top 20"]
    searched = len(list((tmp_path / "results" / "runs" / "mnist" / "search").iterdir()))
    assert searched == 24
    assert "the best of 25 settings, 24 of the grid's 24" in result["note"]
    # It is used without --search too, and has the other rates; but not for more updates.
    assert reproduce("mnist", "--updates", "4") == 0
    runs = tmp_path / "results" / "runs" / "mnist"
    assert not list(runs.glob("adam,*"))
    assert load(tmp_path / "results" / "mnist.json")["note"] == result["note"]
    assert reproduce("mnist", "--updates", "5") == 0
    assert len(list(runs.glob("adam,*"))) == 3


def searched(problem: str, text: str, **asked: Any) -> None:
    config = configure(problem, text, **{"updates": 4, "threads": 1, **asked})
    train(config, Path("runs") / problem / "search" / text.replace(":", ","))


def test_a_search_that_was_stopped_is_no_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there of it, where the command for it leaves it, stands beside the four rates."""
    monkeypatch.setattr(reproduction, "entries", lambda _: ())
    searched("mnist", "adam:rate=2^-6,decay=1")
    searched("mnist", "adam:rate=2^-8,decay=4")  # as without a decay, which need not be run
    searched("mnist", "adam:rate=0.25")
    for text, other in (("adam:rate=2^-7", {"seed": 1}), ("adam:rate=2^-10", {"batch": 20}),
                        ("sgd:rate=2^-6", {}), ("adam:rate=2^-13", {"updates": 3}),
                        ("adam:rate=2^-12", {"dtype": "float64"})):  # fmt: skip
        searched("mnist", text, **other)
    assert reproduce("mnist", "--updates", "4") == 0
    result = load(tmp_path / "results" / "mnist.json")
    assert "Tuned Adam is the best of 6 settings, 4 of the grid's 24." in result["note"]
    assert result["problems"][0]["runs"][-1]["tuned_of"] == 6
    runs = (tmp_path / "results" / "runs" / "mnist").glob("adam,*")
    assert {path.name for path in runs} == {"adam,rate=2^-9", "adam,rate=2^-11"}
    assert reproduce("mnist", "--updates", "4", "--searches", "nowhere") == 0
    result = load(tmp_path / "results" / "mnist.json")
    assert "the best of 4 settings, 3 of the grid's 24" in result["note"]


def test_the_budget_names_the_threads_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduction, "entries", lambda _: AUTOENCODER[:1])
    reproduction.Reproduction(tmp_path, Budget(updates=1), threads=1).make("curves")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    reproduction.Reproduction(tmp_path, Budget(updates=1)).make("curves")  # all was recorded
    assert load(tmp_path / "curves.json")["budget"].endswith("without), 1 thread")


def test_the_figure_of_the_cpu_has_one_tuned_adam_in_its_legend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduction, "entries", lambda _: AUTOENCODER[:1])
    # With few updates the highest rate is the best, and it is another one for each.
    for power, name in enumerate(("curves", "faces", "mnist"), start=5):
        searched(name, f"adam:rate=2^-{power}")
    assert reproduce("cpu", "--updates", "4") == 0
    result = load(tmp_path / "results" / "cpu.json")
    drawn_lines = [run for panel in result["problems"] for run in panel["runs"]]
    tuned = [run for run in drawn_lines if run["setting"] == "tuned"]
    assert [run["title"] for run in tuned] == ["Adam, tuned"] * 3
    labels = [handle.get_label() for handle in progress._handles(result["problems"])]
    assert labels == ["KFRA", "Adam 1e-3", "Adam, tuned"]
    caption = FIGURES["cpu"].caption(result)
    assert "CURVES: rate 2^-5, the best of 5 settings, 3 of the grid's 24; FACES: rate" in caption
    assert "MNIST: rate 2^-7, the best of 5 settings, 4 of" in caption
    assert "paper's figure has binary cross-entropy on all three" in caption
    assert "here FACES has squared error, and the inversion is the factored one" in caption


def test_the_grid_by_the_clock_has_the_updates_of_adam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(reproduction, "grid", lambda updates, _: asked.append(updates) or [])
    made = reproduction.Reproduction(tmp_path, Budget(seconds=0.02), threads=1, search=True)
    monkeypatch.setattr(reproduction, "entries", lambda _: ())
    made.make("curves")
    points = load(tmp_path / "curves.json")["problems"][0]["runs"][0]["points"]
    assert asked == [points[-1][0]]
    assert points[-1][1] >= 0.02


def test_alignment_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["alignment", "--problem", "tiny", "--updates", "2"]
    assert reproduce(*arguments) == 0
    path = tmp_path / "results" / "alignment-tiny.json"
    result, written = load(path), path.stat().st_mtime_ns
    assert result["updates"] == [1, 2]
    assert result["budget"] == "2 updates, batches of 50, 1 thread"
    assert "budget: 2 updates, batches of 50, 1 thread" in FIGURES["alignment"].caption(result)
    assert reproduce(*arguments) == 0
    assert path.stat().st_mtime_ns == written
    said = capsys.readouterr().out
    assert "alignment: results/alignment-tiny.png" in said
    assert said.count("alignment of tiny  KFRA: finished after 2 updates") == 1


def test_ctrl_c_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def stopped(*_: Any, **__: Any) -> Result:
        return Result("stopped", 1, 0.1)

    monkeypatch.setattr(reproduction, "train", stopped)
    assert reproduce("curves", "--updates", "9", "--out", "my results") == 130
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(
        "To go on: gaussnewton reproduce curves --updates 9 --out 'my results' --threads 1"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["reproduce", "curvs"], "no figure 'curvs'; did you mean 'curves'"),
        (["reproduce", "alignment", "--problem", "tiny,mnits"], "no problem 'mnits'"),
        (["report", "nowhere"], "nowhere holds no saved result"),
    ],
)
def test_bad_arguments(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_without_matplotlib_nothing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command in (["reproduce", "curves"], ["claims"], ["demo"]):
        assert main(command) == 2
        assert 'pip install "gaussnewton[experiments]"' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_claims_are_measured_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(claims_command, "shares", lambda _: (0.01, 0.01))
    monkeypatch.setattr(reproduction, "RATES", (0.01,))
    monkeypatch.setattr(reproduction, "entries", lambda name: [
        each for each in entries(name) if each.method != "gaussnewton" and not each.setting
    ])  # fmt: skip
    # Their own tests are elsewhere, and they take seconds.
    for name, fewer in (("rank", {"counts": (1,)}), ("surface", {"points": 21})):
        kind = FIGURES[name]
        small = replace(kind, compute=partial(kind.compute, **fewer))
        monkeypatch.setitem(FIGURES, name, small)
    assert main(["claims", "--seconds", "9", "--threads", "1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("About 9.0 s: 0.01 s of updates for every method on every problem")
    made = {path.stem for path in (tmp_path / "results").glob("*.png")}
    aligned = {"alignment-curves", "alignment-faces", "alignment-mnist"}
    assert made == set(FIGURES) - {"alignment"} | aligned
    assert said.splitlines()[-1] == "results/index.html"
    counts = [int(n) for n in re.findall(r"\d+", said.splitlines()[-3])]
    assert sum(counts) == len(CLAIMS)
    assert said.splitlines()[-3] == "{} held, {} not held, {} not measured".format(*counts)
    assert counts[2] <= 1  # all was measured; of alignment it may be that nothing converged
    assert "CURVES: after " in " ".join(said.split())

    assert main(["report"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "results/index.html"


def recorded(method: str, losses: list[float | None], status: str = "finished") -> Run:
    config = configure("tiny", method, updates=len(losses) - 1)
    lines = [{"update": t, "seconds": 0.5 * t, "loss": v} for t, v in enumerate(losses)]
    return Run(Path(), config, lines, Result(status, len(losses) - 1, 1.0))


def test_runs_that_diverged() -> None:
    """A loss that is no number stands at the end, whether the last line has one or none."""
    entry = Entry("adam", "Adam", "adam", "adam")
    for lost in (recorded("adam", [9.0, 8.0, None], "diverged"),
                 recorded("adam", [9.0, 8.0], "diverged")):  # fmt: skip
        del lost.lines[-1]["loss"]
        lost.lines[-1]["batch_loss"] = None
        assert drawn(lost, entry, Budget())["points"][-1][2] is None


def test_the_best_adam_is_tuned() -> None:
    default = recorded("adam", [9.0, 5.0])
    others = [
        recorded("adam:rate=0.5", [9.0, None], "diverged"),
        recorded("adam:rate=2^-9,decay=20", [9.0, 3.0]),
    ]
    first, tuned = adam_lines(default, others, Budget())
    assert (first["title"], first["setting"], first["style"]) == (ADAM.title, "default", ADAM.style)
    assert tuned["title"] == "Adam, tuned: rate 2^-9, halved every 20"
    assert tuned["points"][-1] == [1, 0.5, 3.0]
    assert tuned["tuned_of"] == 3
    assert "tuned_of" not in first
    assert adam_lines(default, [], Budget())[1]["title"] == "Adam, tuned: rate 0.001"


def test_a_longer_run_that_was_recorded_is_used(tmp_path: Path) -> None:
    """It is cut for the figure, and not repeated, whichever kind of budget it had."""
    maker = reproduction.Reproduction(tmp_path, Budget(updates=6), threads=1)
    longer = maker._run("tiny", "adam")
    again = reproduction.Reproduction(tmp_path, Budget(updates=3), threads=1)._run("tiny", "adam")
    assert [line["update"] for line in again.lines] == [line["update"] for line in longer.lines]
    assert drawn(again, ADAM, Budget(updates=3))["points"][-1][0] == 3
    timed = reproduction.Reproduction(tmp_path, Budget(seconds=1e-4), threads=1)
    assert timed._run("tiny", "adam").lines == longer.lines


def test_runs_end_where_the_budget_does(tmp_path: Path) -> None:
    """The last update overshoots the seconds, and is drawn all the same."""
    config = configure("tiny", "adam", seconds=0.01, threads=1)
    result = train(config, tmp_path)
    points = drawn(read_run(tmp_path), ADAM, Budget(seconds=0.01))["points"]
    assert points[-1][:2] == [result.update, result.seconds]
    assert torch.tensor(points).isfinite().all()
