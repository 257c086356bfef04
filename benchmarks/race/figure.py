"""The losses by seconds, a panel for each problem."""

from __future__ import annotations

import math
from typing import Any

from gaussnewton.experiments.extra import require
from gaussnewton.experiments.figures.style import MUTED, canvas, dress, legend, line, note
from race.settings import RUNNERS
from race.store import Line
from race.tasks import TASKS
from race.times import band, loss_at, loss_of

FIRST = 0.5
"""Seconds: where the logarithmic axis begins."""
COLUMNS = 3
ENDED = 1.05
"""Times the seconds of the shortest run up to which another has as many."""
HEADROOM = 0.5
"""The top of a panel is at least so much of the way, by logarithms, from the least loss to the
first one: where all of them only begin there is little to see."""


def compute(problems: dict[str, dict[str, dict[int, Line]]], budget: str) -> dict[str, Any]:
    """For each problem and runner (seconds, least, median, greatest loss over the seeds).

    Args:
        problems: as ``Store.runs`` has them, by problem.
        budget: on what the figure rests.
    """
    panels = []
    for name, runs in problems.items():
        lines = []
        for runner in RUNNERS:
            marks = [line["marks"] for line in runs.get(runner, {}).values()]
            if marks:
                points = band(marks, _times(marks))
                lines.append({"runner": runner, "points": points, "tails": _tails(marks)})
        levels = [*TASKS[name].targets]
        panels.append({"title": TASKS[name].title, "lines": lines, "targets": levels})
    return {"figure": "race", "budget": budget, "panels": panels}


def _shared_end(runs: list[Any]) -> float:
    """The last moment that all runs have."""
    return float(min(marks[-1][1] for marks in runs))


def _tails(runs: list[Any]) -> list[list[tuple[float, float]]]:
    """(seconds, loss) of each run that went on when another had ended.

    Not of those that only had the last update of the same time: runs end where an update does.
    """
    end = _shared_end(runs)
    runs = [marks for marks in runs if marks[-1][1] > ENDED * end]
    tails = [
        [(end, loss_at(marks, end)), *((m[1], loss_of(m)) for m in marks if m[1] > end)]
        for marks in runs
    ]
    return [tail for tail in tails if len(tail) > 1]


def _times(runs: list[Any]) -> list[float]:
    """Moments spread evenly on a logarithmic axis, and the last that all runs have."""
    end = _shared_end(runs)
    count = 120
    if end <= FIRST:
        return [end]
    step = math.log(end / FIRST) / count
    return [*(FIRST * math.exp(step * i) for i in range(count)), end]


def draw(result: dict[str, Any]) -> Any:
    """Ours on top, and thicker; bands are the least and greatest of the seeds.

    Where one seed ends before the others, each of these goes on as a thin line of its own.
    """
    panels = result["panels"]
    rows = math.ceil(len(panels) / COLUMNS)
    columns = math.ceil(len(panels) / rows)  # four are two by two
    figure = canvas(max(4.8, 4.1 * columns), 1.0 + 3.2 * rows)
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for i, axes in enumerate(grid.flat):
        if i >= len(panels):
            axes.set_axis_off()
            continue
        first = "training loss" if i % columns == 0 else ""
        dress(axes, panels[i]["title"], "seconds of updates", first)
        _panel(axes, panels[i])
    seen = {each["runner"] for panel in panels for each in panel["lines"]}
    legend(figure, _handles([runner for runner in RUNNERS if runner in seen]), len(RUNNERS))
    note(figure, result["budget"])
    return figure


def _look(runner: str) -> dict[str, Any]:
    ours = runner == "default"
    return {**line(RUNNERS[runner].style), "linewidth": 3.0 if ours else 1.4}


def _panel(axes: Any, panel: dict[str, Any]) -> None:
    lows, firsts, ends = [], [], []
    for each in panel["lines"]:
        points = each["points"]
        if not points:
            continue
        times, least, middle, most = zip(*points, strict=True)
        look, order = _look(each["runner"]), 5 if each["runner"] == "default" else 3
        axes.fill_between(times, least, most, color=look["color"], alpha=0.15, linewidth=0)
        axes.plot(times, middle, zorder=order, **look)
        for tail in each["tails"]:
            axes.plot(*zip(*tail, strict=True), zorder=order, **{**look, "linewidth": 0.9})
            lows.append(min(loss for _, loss in tail))
        lows.append(min(least))
        firsts.append(middle[0])
        ends.append(most[-1])
    for target in panel["targets"]:
        axes.axhline(target, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
    axes.set_xscale("log")
    if lows and min(lows) > 0:
        axes.set_yscale("log")
        low, first = min(lows), min(firsts)
        top = max(low * (first / low) ** HEADROOM, 1.1 * max(ends))
        top = min(top, 1.1 * first)  # who diverges leaves the panel
        axes.set_ylim(low * (low / top) ** 0.05, top)
        axes.set_xlim(left=FIRST)
        _plain(axes)


def _plain(axes: Any) -> None:
    """Numbers, not powers of ten, at the ticks."""
    ticker = require("matplotlib.ticker", "drawing figures")
    low, high = axes.get_ylim()
    few = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0) if high < 12 * low else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=few))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _handles(runners: list[str]) -> list[Any]:
    Line2D = require("matplotlib.lines", "drawing figures").Line2D
    return [Line2D([], [], label=RUNNERS[r].title, **_look(r)) for r in runners]
