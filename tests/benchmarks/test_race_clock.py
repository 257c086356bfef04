"""What a hypervisor takes away is nobody's time."""

import time

import pytest
from race import clock

LINE = "cpu{} 464297 102 17271 85306 407 0 25 {} 0 0"


def statistics(tmp_path, *ticks):
    path = tmp_path / "stat"
    rows = [LINE.format(i, each) for i, each in enumerate(ticks)]
    path.write_text("\n".join([LINE.format("", sum(ticks)), *rows, "intr 5 1 2", "ctxt 9"]))
    return path


def test_each_processor_is_read_and_their_sum_is_not(tmp_path):
    one, two = clock.stolen(statistics(tmp_path, 50, 200))
    assert two == pytest.approx(4 * one)
    assert one > 0


def test_a_system_that_says_nothing_takes_nothing(tmp_path):
    assert clock.stolen(tmp_path / "none") == []
    (tmp_path / "old").write_text("cpu0 1 2 3 4\n")
    assert clock.stolen(tmp_path / "old") == []


@pytest.mark.parametrize(
    ("taken", "left"), [((0.0, 0.0), 1.0), ((0.02, 0.05), 0.5), ((9.0, 0.0), 0.001)]
)
def test_the_longest_stop_of_one_processor_is_not_counted(monkeypatch, taken, left):
    told = iter([[5.0, 7.0], [5.0 + taken[0], 7.0 + taken[1]]])
    now = iter([100.0, 100.1])
    monkeypatch.setattr(clock, "stolen", lambda: next(told))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(now))
    assert clock.Lap().seconds() == pytest.approx(0.1 * left)


def test_without_stops_it_is_the_clocks_time(monkeypatch):
    monkeypatch.setattr(clock, "stolen", list)
    lap, begun = clock.Lap(), time.perf_counter()
    time.sleep(0.05)
    assert lap.seconds() == pytest.approx(time.perf_counter() - begun, abs=0.01)
