"""The demonstration, on a small network and for a moment."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gaussnewton.cli import main
from gaussnewton.experiments.figures import load
from gaussnewton.experiments.problems import PROBLEMS
from gaussnewton.experiments.record import Line
from gaussnewton.experiments.training import Training


@pytest.fixture(autouse=True)
def _a_small_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROBLEMS, "curves", replace(PROBLEMS["tiny"], name="curves"))


def test_demo_is_ahead_of_adam_by_update(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["demo", "--seconds", "0.4", "--out", str(tmp_path / "page")]) == 0
    said = capsys.readouterr().out
    assert "All as promised." in said
    assert said.splitlines()[-1] == f"The page: {tmp_path / 'page' / 'index.html'}"
    assert {path.name for path in (tmp_path / "page").iterdir()} == {
        "curves.json", "curves.png", "curves.svg", "index.html"
    }  # fmt: skip
    result = load(tmp_path / "page" / "curves.json")
    adam, ours = result["problems"][0]["runs"]
    assert (adam["method"], adam["setting"], ours["method"]) == ("adam", "default", "gaussnewton")
    # By update: who is ahead after half a second depends on what else the machine does.
    theirs = {update: loss for update, _, loss in adam["points"]}
    shared = [(loss, theirs[update]) for update, _, loss in ours["points"] if update in theirs]
    assert shared[-1][0] < shared[-1][1]
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "claims" not in page.split("</style>")[1]


def test_ctrl_c_ends_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Training.step

    def interrupted(training: Training) -> Line:
        signal.raise_signal(signal.SIGINT)
        return step(training)

    monkeypatch.setattr(Training, "step", interrupted)
    assert main(["demo", "--out", str(tmp_path)]) == 130
    said = capsys.readouterr().out
    assert "Adam: stopped after 1 updates" in said
    assert said.splitlines()[-1] == "Stopped. Nothing is saved: gn.GaussNewton had not begun."
    assert not list(tmp_path.iterdir())


def test_ctrl_c_saves_what_the_demo_has_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Training.step

    def interrupted(training: Training) -> Line:
        if not training.method.second_order:
            training.seconds += 100.0  # Adam is done soon
        elif training.update == 10:
            signal.raise_signal(signal.SIGINT)
        return step(training)

    monkeypatch.setattr(Training, "step", interrupted)
    assert main(["demo", "--out", str(tmp_path)]) == 130
    said = capsys.readouterr().out
    assert "stopped after 11 updates" in said
    assert said.splitlines()[-1] == (
        f"Stopped. The page of what was measured: {tmp_path / 'index.html'}"
    )
    result = load(tmp_path / "curves.json")
    assert result["problems"][0]["runs"][1]["points"][-1][0] == 11  # though that is no mark
    assert "stopped before" in result["budget"]
    assert (tmp_path / "index.html").exists()
