"""What ``gaussnewton claims`` says of the time it takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gaussnewton.cli import main
from gaussnewton.experiments.commands import claims
from gaussnewton.experiments.lineup import RATES


def test_the_budget_that_is_printed_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """What runs and alignments are said to take, is what was asked for in all."""
    monkeypatch.setattr(claims, "make", lambda *_: True)
    monkeypatch.setattr(claims, "show", lambda _: None)
    assert main(["claims", "--seconds", "7200", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("About 2 h 00 min: ")
    assert f"for Adam at each of {len(RATES) + 1} rates" in said
    found = re.search(
        r"min: (\S+) s of updates .* \((\d+) runs, about (\S+) times .* about (\S+) s for", said
    )
    assert found
    each, runs, overhead, aligned = map(float, found.groups())
    assert each * runs * overhead + 3 * aligned == pytest.approx(7200.0, rel=0.01)
