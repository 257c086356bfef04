"""Loss by update and by wall-clock for several methods (figs. cmp, mnist:mix, cmp:cpu)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from gaussnewton.experiments.extra import require
from gaussnewton.experiments.figures.style import canvas, dress, legend, line, note

if TYPE_CHECKING:
    import matplotlib.figure

Point = Sequence[Any]
"""(update, seconds, loss); a loss that is no number may be None."""

By = Literal["update", "seconds"]

WINDOW = 10
"""The paper averages errors over a sliding window of ten, unless a run says another ``window``."""

_LABELS = {"update": "updates", "seconds": "seconds"}
_FACTOR = 3.0  # a loss that falls by more than this is drawn on a logarithmic scale


def mean_of_top(runs: Sequence[dict[str, Any]], k: int, title: str, style: str) -> dict[str, Any]:
    """The mean of the k settings that end lowest, as one run.

    Runs of one method with different settings are compared by :func:`final_loss`; those that end
    without a number rank last. Seconds and losses are averaged at the updates that all k runs have.

    Example:
        >>> from gaussnewton.experiments.figures.progress import mean_of_top
        >>> runs = [{"title": str(v), "points": [[1, 0.5, 9.0], [2, 1.0, v]]} for v in (4., 1., 2.)]
        >>> mean_of_top(runs, 2, "top 2", "adam dotted")["points"]
        [[1, 0.5, 9.0], [2, 1.0, 1.5]]
    """
    if not 1 <= k <= len(runs):
        raise ValueError(f"the top {k} cannot be had of {len(runs)} runs")
    best = sorted(runs, key=final_loss)[:k]
    tables = [{int(u): (s, v) for u, s, v in run["points"]} for run in best]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    points = [
        [u, sum(t[u][0] for t in tables) / k, sum(t[u][1] for t in tables) / k] for u in shared
    ]
    return {"title": title, "style": style, "points": points, "window": window_of(best[0])}


def window_of(run: dict[str, Any]) -> int:
    """Over how many points a run's losses are averaged.

    Losses of batches are noisy and want the paper's ten. One that was evaluated on much data,
    with averaged parameters, does not, and ten such points may reach back over half of a run.
    """
    return int(run.get("window", WINDOW))


def final_loss(run: dict[str, Any]) -> float:
    """The mean of the losses in a run's last window; infinite if one of them is not a number.

    Example:
        >>> from gaussnewton.experiments.figures.progress import final_loss
        >>> final_loss({"points": [[1, 0.1, 3.0], [2, 0.2, 1.0]]})
        2.0
    """
    last = [_number(v) for _, _, v in run["points"][-window_of(run) :]]
    mean = sum(last) / len(last) if last else math.inf
    return mean if math.isfinite(mean) else math.inf


def compute(
    name: str,
    problems: Sequence[dict[str, Any]],
    *,
    budget: str,
    note: str = "",
    by: Sequence[By] = ("update", "seconds"),
) -> dict[str, Any]:
    """Check run records and put them together as one result.

    Args:
        name: of the figure, e.g. "curves".
        problems: each ``{"title": "CURVES", "runs": […]}``, and ``"ylabel"`` if the loss has a
            better name. A run is ``{"title", "style", "points": [[update, seconds, loss], …]}``,
            its points in order; a loss that is no number is null or NaN. ``"method"`` ("kfra",
            "kfac", "kflr", "gaussnewton", "adam", …) and, for Adam, ``"setting"`` ("default",
            "tuned", "top 10", …) tell :mod:`gaussnewton.experiments.claims` what it is;
            ``"window"`` is that of :func:`window_of`.
        budget: on what the figure rests, e.g. "60 s a method; full size: 5,000 updates".
        note: more for the caption: which losses, which settings.
        by: the panels of each problem.

    Example:
        >>> from gaussnewton.experiments.figures import progress
        >>> run = {"title": "KFRA", "style": "kfra", "points": [[1, 0.2, 3.0], [2, 0.4, 1.0]]}
        >>> result = progress.compute("curves", [{"title": "CURVES", "runs": [run]}], budget="2")
        >>> result["figure"], result["problems"][0]["runs"][0]["points"][1]
        ('curves', [2, 0.4, 1.0])
    """
    if not problems or not all(problem["runs"] for problem in problems):
        raise ValueError("a figure of progress needs at least one problem, and a run for each")
    for problem in problems:
        for run in problem["runs"]:
            line(run["style"])  # raises for a style that does not exist
            ends = [(u, s) for u, s, _ in run["points"]]
            if not ends or ends != sorted(ends):
                raise ValueError(f"the points of {run['title']!r} are none, or not in order")
    return {
        "figure": name, "budget": budget, "note": note, "by": list(by), "problems": list(problems)
    }  # fmt: skip


def smoothed(points: Sequence[Point], window: int = WINDOW) -> list[list[Any]]:
    """Points with the mean of the last so many losses in place of each loss."""
    losses = [_number(v) for _, _, v in points]
    return [
        [u, s, sum(part) / len(part)]
        for i, (u, s, _) in enumerate(points)
        if (part := losses[max(0, i + 1 - window) : i + 1])
    ]


def caption(result: dict[str, Any]) -> str:
    """What the figure shows, and on what it rests."""
    what = " and ".join({"update": "by update", "seconds": "by seconds"}[by] for by in result["by"])
    where = ", ".join(problem["title"] for problem in result["problems"])
    runs = [run for problem in result["problems"] for run in problem["runs"]]
    lost = any(not math.isfinite(_number(v)) for run in runs for _, _, v in run["points"])
    widest = max(window_of(run) for run in runs)
    averaged = f", averaged over a sliding window of {widest} points" if widest > 1 else ""
    said = f"{result['note']} " if result.get("note") else ""
    return (
        f"{where}: training loss {what}{averaged}. {said}"
        f"{'A cross marks where a run no longer had a finite loss. ' if lost else ''}"
        f"Budget: {result['budget']}."
    )


def draw(result: dict[str, Any]) -> matplotlib.figure.Figure:
    """A row for each problem with its panels side by side; single panels share one row."""
    problems, axes_of = result["problems"], result["by"]
    single = len(axes_of) == 1
    rows, columns = (1, len(problems)) if single else (len(problems), len(axes_of))
    figure = canvas(max(4.6, 4.3 * columns), 0.9 + 3.1 * rows)
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for i, problem in enumerate(problems):
        row = [grid[0, i]] if single else list(grid[i])
        for axes, by in zip(row, axes_of, strict=True):
            first = axes is row[0] and (not single or i == 0)
            label = problem.get("ylabel", "training loss") if first else ""
            dress(axes, f"{problem['title']}, by {by}", _LABELS[by], label)
            _panel(axes, problem["runs"], by)
    legend(
        figure, _handles(problems), min(4, len({r["title"] for p in problems for r in p["runs"]}))
    )
    note(figure, f"budget: {result['budget']}")
    return figure


def _panel(axes: Any, runs: Sequence[dict[str, Any]], by: By) -> None:
    column = 0 if by == "update" else 1
    seen: list[float] = []
    for run in runs:
        points = smoothed(run["points"], window_of(run))
        values = [p[2] for p in points]
        axes.plot([p[column] for p in points], values, **line(run["style"]))
        finite = [p for p in points if math.isfinite(p[2])]
        seen += [p[2] for p in finite]
        if finite and len(finite) < len(points):  # where the run was lost
            end = finite[-1]
            axes.plot(end[column], end[2], "X", color=line(run["style"])["color"], markersize=8)
    if seen and min(seen) > 0 and max(seen) > _FACTOR * min(seen):
        axes.set_yscale("log")
        _plain_ticks(axes, min(seen), max(seen))
    axes.set_xlim(left=0)


def _plain_ticks(axes: Any, lowest: float, highest: float) -> None:
    """Numbers at the ticks between powers of ten too, where there are few powers of ten."""
    if highest < 300 * lowest:
        ticker = require("matplotlib.ticker", "drawing figures")
        few = (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=few))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _handles(problems: Sequence[dict[str, Any]]) -> list[Any]:
    """One entry for each title, whichever panels have it."""
    Line2D = require("matplotlib.lines", "drawing figures").Line2D
    styles = {run["title"]: run["style"] for problem in problems for run in problem["runs"]}
    return [Line2D([], [], label=title, **line(style)) for title, style in styles.items()]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
