"""Grids and successive halving."""

import math

from race.halving import best_of, rungs
from race.settings import RUNNERS

GRID = [{"rate": float(i)} for i in range(8)]


def test_the_papers_grid_is_whole():
    adam = RUNNERS["adam"].grid()
    assert len(adam) == 40
    assert {each["rate"] for each in adam} == {2.0**-p for p in range(6, 14)}
    assert {each["decay"] for each in adam} == {1.0, 0.5, 0.25, 0.125, 0.0625}
    assert RUNNERS["default"].grid() == [{}]


def test_the_best_quarter_goes_on_for_four_times_as_long():
    tried = []

    def trial(setting, seconds):
        tried.append((setting["rate"], seconds))
        return {3.0: 1.0, 5.0: 2.0}.get(setting["rate"], 10.0) if seconds == 15 else setting["rate"]

    assert best_of(GRID, trial, 15.0) == {"rate": 3.0}
    assert tried == [(float(i), 15.0) for i in range(8)] + [(3.0, 60.0), (5.0, 60.0)]


def test_the_longer_trial_decides():
    def trial(setting, seconds):
        return setting["rate"] if seconds == 1 else -setting["rate"]

    assert best_of(GRID, trial, 1.0) == {"rate": 1.0}


def test_what_diverged_is_worst():
    def trial(setting, _):
        return {2.0: 5.0, 6.0: 4.0}.get(setting["rate"], math.nan)

    assert best_of(GRID, trial, 1.0) == {"rate": 6.0}


def test_one_setting_is_not_tried():
    assert rungs(1, 15.0) == []
    assert best_of([{}], None, 15.0) == {}  # type: ignore[arg-type]
