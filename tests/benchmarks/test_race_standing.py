"""Ratios, verdicts and tables from raw results."""

import pytest
from race import figure
from race.defaults import KEY
from race.standing import Standing, standing, targets_of, verdict
from race.tables import (
    bars_table,
    grids_table,
    mixed_text,
    problem_table,
    report,
    seeds_table,
)
from race.times import NEVER, Reached


def run(problem, runner, seed, factor, end, *, leader=False):
    """A loss that falls by a factor each second from 100."""
    marks = [[10 * t, float(t), 100.0 * factor**t, "present"] for t in range(end + 1)]
    setting = {"rate": 2.0**-9, "decay": 0.5} if runner == "adam" else {}
    return {
        "kind": "race", "problem": problem, "runner": runner, "seed": seed, "setting": setting,
        "seconds": 10.0, "leader": leader, "failure": "", "versions": {}, "marks": marks,
    }  # fmt: skip


def runs_of(problem, **factors):
    """By runner and seed; factors are (factor, end)."""
    return {
        name: {
            seed: run(problem, name, seed, factor, end, leader=name == "adam")
            for seed, (factor, end) in enumerate(seeds)
        }
        for name, seeds in factors.items()
    }


def test_ratio_of_medians_and_lower_bounds():
    runs = runs_of(
        "mnist",
        default=[(0.5, 10)] * 3,
        adam=[(0.9, 30), (0.9, 30), (0.99, 30)],
        soap=[(0.99, 10), (0.99, 14), (0.99, 8)],
    )
    target = targets_of("mnist", runs)[0]
    assert target.name == "60"
    ours = standing(["default"], runs, target)
    adam = standing(["adam"], runs, target)
    soap = standing(["soap"], runs, target)
    assert adam.ratio(ours) == pytest.approx(6.579, rel=1e-3)  # log 0.5 / log 0.9
    assert soap.when == NEVER
    assert soap.ratio(ours) == pytest.approx(10.0 / ours.when.seconds)  # 10 s is the median
    best = standing(["adam", "soap"], runs, target)
    assert best.who == "adam"
    assert best.when == adam.when


def test_the_target_of_a_seed_is_its_own_peers_last_loss():
    runs = runs_of("curves", default=[(0.5, 10)] * 2, adam=[(0.9, 20), (0.8, 20)])
    (target,) = targets_of("curves", runs)
    assert target.of == {0: pytest.approx(100 * 0.9**20), 1: pytest.approx(100 * 0.8**20)}
    assert standing(["adam"], runs, target).when.seconds == pytest.approx(20.0)


def test_of_several_leaders_the_better_one_sets_the_target():
    runs = runs_of("curves", default=[(0.5, 10)], adam=[(0.9, 20)], muon=[(0.8, 20)])
    runs["muon"][0]["leader"] = True
    (target,) = targets_of("curves", runs)
    assert target.of == {0: pytest.approx(100 * 0.8**20)}
    assert "Muon" in target.origin
    assert "Adam" not in target.origin


def test_verdicts_say_no_more_than_is_known():
    ours = Standing("default", Reached(10.0, 50.0), float("inf"))
    slow = Standing("adam", Reached(70.0, 500.0), float("inf"))
    close = Standing("adam", Reached(50.0, 500.0), float("inf"))
    given_up_late = Standing("adam", NEVER, 100.0)
    given_up_early = Standing("adam", NEVER, 30.0)
    assert verdict(ours, slow, 6.0) == "reached"
    assert verdict(ours, close, 6.0) == "not reached"
    assert verdict(ours, given_up_late, 6.0) == "reached"
    assert verdict(ours, given_up_early, 6.0).startswith("open")
    assert verdict(Standing("default", NEVER, 60.0), slow, 6.0).startswith("not reached")


def test_the_report_has_every_number():
    runs = runs_of("mnist", default=[(0.5, 10)] * 3, adam=[(0.9, 30)] * 3)
    assert "not in 10 s" not in problem_table("mnist", runs)
    assert "| 6.6 | 6 | reached |" in " ".join(bars_table({"mnist": runs}).split())
    asked = {
        "command": "python benchmarks/race.py", "search": 5.0, "race": 10.0, "long": 30.0,
        "turn": 2.0, "threads": 2, "powers": [], "decays": [],
    }  # fmt: skip
    text = report({"mnist": runs}, [asked, asked], {"torch": "2"})
    assert text.count("python benchmarks/race.py") == 1
    assert "rate 2^-9, halved every 0.5" in text
    assert "20 s each" in text
    limited = [
        asked | {"race": seconds, "powers": [power], "decays": [1.0]}
        for seconds, power in ((40.0, -7), (60.0, -9))
    ]
    text = report({"mnist": runs}, limited, {"torch": "2"})
    assert "Each contender has 40 or 60 s" in text
    assert "2 rates from 2^-9 to 2^-7, not halved" in text


def test_each_problem_has_the_grid_that_was_searched_on_it():
    problems = {
        name: runs_of(name, default=[(0.5, 10)], adam=[(0.9, 30)]) for name in ("mnist", "curves")
    }
    asked = {"powers": [-7, -9], "decays": [1.0], "command": "race.py --problems mnist --seeds 1"}
    others = {"powers": [], "decays": [], "command": "race.py --problems curves --runners default"}
    whole = {"powers": [], "decays": [], "command": "race.py --problems curves"}
    table = grids_table(problems, [asked, others, whole])
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in table.splitlines()]
    assert ["Adam", "MNIST autoencoder", "2 rates from 2^-9 to 2^-7, not halved"] in rows
    assert any(row[:2] == ["Adam", "CURVES autoencoder"] and "8 rates" in row[2] for row in rows)


def test_each_seed_by_itself():
    runs = runs_of(
        "mnist", default=[(0.5, 10), (0.7, 10)], adam=[(0.9, 30)] * 2, muon=[(0.9, 3), (0.8, 9)]
    )
    rows = [row.split("|") for row in seeds_table("mnist", runs).splitlines()]
    to_60 = [[cell.strip() for cell in row] for row in rows if row[1].strip() == "60"]
    assert [row[2] for row in to_60] == ["0", "1"]
    assert [row[4].split(":")[0] for row in to_60] == ["Adam", "Muon"]  # whoever was first
    assert [row[5] for row in to_60] == ["6.6", "1.6"]  # log 0.5 / log 0.9, log 0.7 / log 0.8
    assert [row[6] for row in to_60] == ["", ""]  # kfac-jax did not race


def test_medians_over_different_defaults_are_said_to_be_that():
    runs, now = runs_of("mnist", default=[(0.5, 10)] * 3), "4e5f6071"
    assert "earlier defaults" in mixed_text(runs, now)
    assert "not noted" in mixed_text(runs, now)
    runs["default"][1]["versions"] = {KEY: "0a1b2c3d"}
    assert "0a1b2c3d: seeds 1" in mixed_text(runs, now)
    assert "not noted: seeds 0, 2" in mixed_text(runs, now)
    for seed in range(3):
        runs["default"][seed]["versions"] = {KEY: now}
    assert mixed_text(runs, now) == ""


def test_the_figure_shows_all_seeds():
    runs = runs_of("mnist", default=[(0.5, 10), (0.6, 10), (0.7, 8)], adam=[(0.9, 30)] * 3)
    result = figure.compute({"mnist": runs}, "three seeds")
    ours = result["panels"][0]["lines"][0]
    seconds, least, middle, most = ours["points"][-1]
    assert seconds == 8.0
    assert (least, middle, most) == pytest.approx((100 * 0.5**8, 100 * 0.6**8, 100 * 0.7**8))
    assert [tail[-1][0] for tail in ours["tails"]] == [10.0, 10.0]
    began = [each for tail in ours["tails"] for each in tail[0]]
    assert began == pytest.approx([8.0, 100 * 0.5**8, 8.0, 100 * 0.6**8])
    drawn = figure.draw(result).axes
    assert len(drawn) == 1
    assert len(drawn[0].lines) == 2 + 2 + 3  # two runners, two tails of ours, three targets


def test_runs_that_end_an_update_apart_have_no_tails():
    runs = runs_of("mnist", default=[(0.5, 100), (0.6, 101), (0.7, 103)])
    assert figure.compute({"mnist": runs}, "")["panels"][0]["lines"][0]["tails"] == []


def test_four_panels_are_two_by_two():
    names = ("mnist", "curves", "faces", "classifier")
    problems = {name: runs_of(name, default=[(0.5, 10)], adam=[(0.9, 30)]) for name in names}
    grid = figure.draw(figure.compute(problems, "")).axes[0].get_gridspec()
    assert (grid.nrows, grid.ncols) == (2, 2)
