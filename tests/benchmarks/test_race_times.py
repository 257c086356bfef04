"""Seconds to a loss, and their medians."""

import math

import pytest
from race.times import NEVER, Reached, band, loss_at, median, medians, reached

# The loss halves every 2 s and every 4 updates.
HALVING = [(4 * k, 2.0 * k, 64.0 * 0.5**k, "present") for k in range(6)]


def test_time_to_a_loss_lies_between_the_marks_by_logarithms():
    for k in (0.0, 0.5, 1.25, 4.75):
        found = reached(HALVING, 64.0 * 0.5**k)
        assert found.seconds == pytest.approx(2.0 * k)
        assert found.updates == pytest.approx(4 * k)


def test_a_mark_that_equals_the_target_reaches_it():
    assert reached(HALVING, 16.0) == Reached(4.0, 8.0)
    assert reached(HALVING, 2.0) == Reached(10.0, 20.0)


def test_a_loss_below_the_last_one_is_never_reached():
    assert reached(HALVING, 1.99) is NEVER
    assert not NEVER.ever
    assert reached([], 1.0) is NEVER


def test_the_first_of_several_crossings_counts():
    marks = [(0, 0.0, 8.0), (1, 1.0, 2.0), (2, 2.0, 8.0), (3, 3.0, 1.0)]
    assert reached(marks, 4.0) == Reached(0.5, 0.5)


def test_losses_that_are_no_numbers_reach_nothing():
    marks = [(0, 0.0, 8.0), (1, 1.0, None), (2, 2.0, math.nan), (3, 3.0, 4.0)]
    # There is nothing to interpolate from: it is at the mark itself.
    assert reached(marks, 5.0) == Reached(3.0, 3.0)


def test_a_seed_that_never_arrived_is_not_left_out_of_the_median():
    quick, slow = HALVING, HALVING[:2]
    assert medians([quick, quick, slow], [16.0] * 3) == Reached(4.0, 8.0)
    assert medians([quick, slow, slow], [16.0] * 3) == NEVER
    assert median([1.0, math.inf]) == math.inf
    assert median([]) == math.inf


def test_each_seed_has_its_own_target():
    assert medians([HALVING] * 3, [32.0, 8.0, 4.0]).seconds == pytest.approx(6.0)


def test_loss_at_a_moment():
    assert loss_at(HALVING, 3.0) == pytest.approx(64.0 * 0.5**1.5)
    assert loss_at(HALVING, 10.0) == 2.0
    assert math.isnan(loss_at(HALVING, 10.1))


def test_band_has_only_moments_that_all_runs_have():
    half = [(u, s, loss / 2, of) for u, s, loss, of in HALVING[:3]]
    found = band([HALVING, half], [2.0, 4.0, 6.0])
    assert [point[0] for point in found] == [2.0, 4.0]
    assert found[0] == pytest.approx((2.0, 16.0, 24.0, 32.0))
