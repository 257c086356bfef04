"""The grid of first-order methods, and what comes of it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from gaussnewton.errors import ExperimentError
from gaussnewton.experiments import record
from gaussnewton.experiments.config import Config, configure
from gaussnewton.experiments.record import Folder, Line, Run, read_runs
from gaussnewton.experiments.run import Watcher
from gaussnewton.experiments.search import folder_name, grid, ranked, search
from gaussnewton.experiments.tables import comparison, loss_at, ranking


class Counting(Watcher):
    """Notes what was run, and stops it where asked."""

    def __init__(self, stop_at: tuple[str, int] | None = None) -> None:
        self.began: list[tuple[str, int]] = []
        self.stop_at = stop_at

    def begin(self, config: Config, update: int, seconds: float) -> None:  # noqa: ARG002
        self.began.append((config.method, update))

    def line(self, line: Line) -> None:
        if self.stop_at == (self.began[-1][0], line["update"]):
            signal.raise_signal(signal.SIGINT)


def configs(*methods: str, updates: int = 4) -> list[Config]:
    return [configure("tiny", text, updates=updates, threads=1) for text in methods]


def recorded(path: Path, method: str, losses: list[float], status: str = "finished") -> None:
    """A run as it would be recorded, with these losses at updates 0, 1, …"""
    path.mkdir(parents=True)
    config = configure("tiny", method, updates=len(losses) - 1, threads=1)
    (path / "config.json").write_text(json.dumps(config.as_dict()))
    lines = [
        {"update": t, "seconds": 0.5 * t * (1 + losses[0]), "loss": loss}
        for t, loss in enumerate(losses)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {"status": status, "update": len(losses) - 1, "seconds": 1.0, "loss": losses[-1]}
    (path / "result.json").write_text(json.dumps(result))


def test_the_papers_grid() -> None:
    methods = grid(40_000)
    assert len(methods) == 4 * 8 * 5
    assert {each.name for each in methods} == {"sgd", "momentum", "nesterov", "adam"}
    assert {each.values["rate"] for each in methods} == {2.0**-k for k in range(6, 14)}
    periods = {each.values["decay"] for each in methods}
    assert periods == {40_000, 20_000, 10_000, 5_000, 2_500}


def test_short_runs_have_no_setting_twice() -> None:
    texts = [each.text for each in grid(4, ["sgd"], [0.5])]
    assert texts == [f"sgd:rate=0.5,decay={period}" for period in (4, 2, 1)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((10, ["kfra"]), "kfra has no learning rate"),
        ((10, ["adem"]), "did you mean 'adam'"),
        ((10, ["adam"], [0.5], [2.0]), "above 0 and up to 1, not 2"),
    ],
)
def test_what_cannot_be_searched(arguments: tuple, sentence: str) -> None:
    with pytest.raises(ExperimentError, match=sentence):
        grid(*arguments)


def test_a_search_stops_and_goes_on_without_repeating(tmp_path: Path) -> None:
    asked = configs("sgd", "sgd:rate=1e38", "adam")
    first = Counting(stop_at=("sgd", 2))
    assert [r.status for r in search(asked, tmp_path, watcher=first)] == ["stopped"]
    second = Counting()
    results = list(search(asked, tmp_path, watcher=second))
    assert [r.status for r in results] == ["finished", "diverged", "finished"]
    assert second.began == [("sgd", 2), ("sgd:rate=1e+38", 0), ("adam", 0)]
    third = Counting()
    assert list(search(asked, tmp_path, watcher=third)) == results
    assert third.began == []
    assert not list(tmp_path.glob("**/checkpoint.pt"))
    order = [run.config.method for run in ranked(tmp_path)]
    assert order == ["sgd", "adam", "sgd:rate=1e+38"]


def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path: Path) -> None:
    asked = configs("sgd", "adam", updates=2)
    with Folder(tmp_path / folder_name(asked[0])).claimed():
        results = list(search(asked, tmp_path))
    assert len(results) == 1
    assert [run.config.method for run in read_runs(tmp_path) if run.result] == ["adam"]


def test_folders_are_told_apart() -> None:
    texts = [each.text for each in grid(1000)]
    names = {folder_name(config) for config in configs(*texts)}
    names |= {folder_name(configure("tiny", "adam", seed=seed)) for seed in (0, 1)}
    assert len(names) == len(texts) + 2
    assert not any(set("/\\: ") & set(name) for name in names)


def three(folder: Path) -> list[Run]:
    recorded(folder / "a", "adam:rate=0.1", [9.0, 5.0, 4.0])
    recorded(folder / "b", "adam:rate=0.2", [7.0, 2.0, 1.0])
    recorded(folder / "c", "adam:rate=0.3", [8.0, 0.5], status="diverged")
    return ranked(folder)


def test_ranking_reads_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: Path) -> None:
        raise AssertionError("a search has many lines, and all that is needed is in the results")

    monkeypatch.setattr(record, "read_lines", never)
    runs = three(tmp_path)
    assert [run.path.name for run in runs] == ["b", "a", "c"]
    rows = ranking(runs, most=2).splitlines()[2:]
    assert [row.split()[:5] for row in rows] == [
        ["1", "Adam", "0.2", "–", "1"],
        ["2", "Adam", "0.1", "–", "4"],
    ]


def test_runs_are_ranked_as_far_as_asked(tmp_path: Path) -> None:
    """One was recorded with more updates, one with fewer, and one is not asked for."""
    for rate, losses in (("0.1", [9.0, 8.0, 5.0, 0.1]), ("0.2", [9.0, 8.0, 4.0]),
                         ("0.3", [9.0, 1.0]), ("0.4", [9.0, 8.0, 1.0])):  # fmt: skip
        recorded(tmp_path / f"adam,rate={rate}", f"adam:rate={rate}", losses)
    asked = configs("adam:rate=0.1", "adam:rate=0.2", "adam:rate=0.3", "adam:rate=0.5", updates=2)
    runs = ranked(tmp_path, asked)
    assert [(run.config.method, run.standing.score) for run in runs] == [
        ("adam:rate=0.2", 4.0),
        ("adam:rate=0.1", 5.0),
    ]


def test_the_table_of_a_comparison(tmp_path: Path) -> None:
    runs = three(tmp_path)
    assert [loss_at(run, 1.0) for run in runs] == [2, 5, 0.5]
    assert loss_at(runs[2], 2.0) is None
    table = comparison(runs)
    assert "cross-entropy in nats" in table
    rows = [line for line in table.splitlines() if line.startswith("Adam")]
    assert [row.split()[3:7] for row in rows] == [
        ["7", "7", "2", "1"],
        ["9", "9", "5", "4"],
        ["8", "8", "0.5", "–"],
    ]
    assert "diverged" in rows[2]


def test_the_table_of_runs_that_end_by_the_clock(tmp_path: Path) -> None:
    for method, seconds in (("sgd", [0.0, 2000.0, 4004.0]), ("adam", [0.0, 3000.0, 4002.0])):
        path = tmp_path / method
        recorded(path, method, [9.0, 5.0, 4.0])
        config = configure("tiny", method, seconds=4000.0, threads=1)
        (path / "config.json").write_text(json.dumps(config.as_dict()))
        lines = [{"update": t, "seconds": at, "loss": 9.0 - t} for t, at in enumerate(seconds)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = comparison(read_runs(tmp_path))
    assert " 4004 s " in table
    rows = {row.split()[0]: row.split()[1:5] for row in table.splitlines()[-2:]}
    assert rows == {"Adam": ["9", "9", "9", "7"], "SGD": ["9", "9", "8", "7"]}
