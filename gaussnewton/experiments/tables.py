"""Runs side by side, as text."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from gaussnewton.experiments.live import duration
from gaussnewton.experiments.methods import written
from gaussnewton.experiments.record import Run

SHARES = (0.1, 0.25, 0.5, 1.0)


def comparison(runs: Sequence[Run]) -> str:
    """A table of runs: the loss along the way, and the time an update took.

    The loss is that of averaged parameters where a method has them.
    """
    problem = runs[0].config.the_problem()
    by_time = all(run.config.updates is None for run in runs)
    key = "seconds" if by_time else "update"
    ends = [run.lines[-1][key] for run in runs if run.lines] or [0]
    most = max(ends)
    marks = [most * share for share in SHARES]
    rows = [
        [
            run.config.the_method().label,
            *(_number(loss_at(run, mark, key)) for mark in marks[: 3 if by_time else 4]),
            # Runs of some seconds overshoot by less than an update, each by another bit.
            *([_number(loss_at(run, run.lines[-1][key], key))] if by_time else []),
            *_ending(run),
        ]
        for run in runs
    ]
    heads = [f"{mark:.0f} s" if by_time else f"{mark:.0f}" for mark in marks]
    table = tabulate(
        rows,
        ["method", *heads, "updates", "time", "an update", "state"],
        disable_numparse=True,
        colalign=("left", *["right"] * (len(heads) + 3), "left"),
    )
    after = "seconds in updates" if by_time else "updates"
    return f"{problem.title}: {problem.shown},\nafter so many {after}:\n\n{table}"


def ranking(runs: Sequence[Run], most: int = 10) -> str:
    """A table of the best runs of a search, given in their order."""
    rows = [
        [
            place,
            run.config.the_method().title,
            *(
                "–" if value is None else written(value)
                for value in (run.config.the_method().values.get(key) for key in ("rate", "decay"))
            ),
            _number(run.standing.score),
            *_ending(run)[:2],
        ]
        for place, run in enumerate(runs[:most], 1)
    ]
    return tabulate(
        rows,
        ["", "method", "rate", "halved every", "loss", "updates", "time"],
        disable_numparse=True,
        colalign=("right", "left", *["right"] * 5),
    )


def loss_at(run: Run, mark: float, against: str = "update") -> float | None:
    """The loss evaluated last up to some update or second; None if the run did not get there."""
    if not run.lines or run.lines[-1][against] < mark:
        return None
    key = "averaged_loss" if run.config.the_method().second_order else "loss"
    x, y = run.curve(key, against)
    return next(
        (value for at, value in zip(reversed(x), reversed(y), strict=True) if at <= mark), None
    )


def _ending(run: Run) -> list[str]:
    result = run.standing
    took = 1000 * result.seconds / max(result.update, 1)
    each = f"{took:.0f} ms" if took >= 100 else f"{took:.3g} ms"
    return [str(result.update), duration(result.seconds), each, result.status]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
