"""What the figures of progress show: which runs, and how a run becomes a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gaussnewton.experiments.budget import Budget
from gaussnewton.experiments.figures.progress import final_loss, mean_of_top
from gaussnewton.experiments.methods import written
from gaussnewton.experiments.record import Line, Run

Drawn = dict[str, Any]
"""A run as :func:`gaussnewton.experiments.figures.progress.compute` takes it."""


@dataclass(frozen=True)
class Entry:
    """A run of a figure.

    Attributes:
        text: the method, as on the command line.
        title: for the legend.
        style: of the line.
        method: what :mod:`gaussnewton.experiments.claims` calls it.
        setting: and which of its settings this is.
    """

    text: str
    title: str
    style: str
    method: str
    setting: str = ""


def _papers(name: str) -> tuple[Entry, Entry]:
    title = name.upper()
    return (
        Entry(name, title, name, name),
        Entry(f"{name}-ma", f"{title}, moving average", f"{name} dashed", name, "moving average"),
    )


DEFAULT = Entry("default", "gn.GaussNewton", "gaussnewton", "gaussnewton")
ADAM = Entry("adam:rate=0.001", "Adam 1e-3", "adam dotted", "adam", "default")
AUTOENCODER = (*_papers("kfra"), *_papers("kfac"), DEFAULT)
# The paper has curvature averaged for all of these: "it stabilises convergence".
MIXTURE = (
    Entry("kflr-ma", "KFLR, moving average", "kflr", "kflr", "moving average"),
    Entry("kfra-ma", "KFRA, moving average", "kfra", "kfra", "moving average"),
    Entry("kfac-ma", "KFAC, moving average", "kfac", "kfac", "moving average"),
    DEFAULT,
)
RATES = (2.0**-8, 2.0**-9, 2.0**-11)
"""Beside 1e-3, which is about 2^-10, where there was no search."""

TOPS = {10: "adam dashed", 20: "adam dashdot"}

LOSSES = (
    "The loss is that of 5,000 training data, the same for all; for methods with curvature that of "
    "the averaged parameters (appendix B.4), or of the present ones while the average lags behind."
)


def entries(problem: str) -> tuple[Entry, ...]:
    """The methods with curvature of a problem's figure."""
    return MIXTURE if problem == "mixture" else AUTOENCODER


def drawn(run: Run, entry: Entry, budget: Budget) -> Drawn:
    """A recorded run as a line of a figure, as far as the budget goes.

    The loss is that of averaged parameters where the method has curvature, or that of the present
    ones where it is lower: over a short budget the average lags behind. A run that diverged ends
    with a loss that is no number.
    """
    points = [[at["update"], at["seconds"], _loss(at)] for at in run.lines if "loss" in at]
    last = run.lines[-1]
    if run.result is not None and run.result.status == "diverged" and points[-1][2] is not None:
        points.append([last["update"], last["seconds"], None])
    # The last update of a run by the clock ends after its budget and is still part of it.
    longer = any(
        mine is not None and (theirs is None or theirs > mine)
        for mine, theirs in (
            (budget.updates, run.config.updates),
            (budget.seconds, run.config.seconds),
        )
    )
    return {
        "title": entry.title, "style": entry.style, "method": entry.method,
        "setting": entry.setting, "points": budget.points(points) if longer else points,
        "window": 1,
    }  # fmt: skip


def _loss(line: Line) -> float | None:
    known = [line[key] for key in ("loss", "averaged_loss") if line.get(key) is not None]
    return min(known, default=None)


def adam_lines(default: Run, candidates: Sequence[Run], budget: Budget) -> list[Drawn]:
    """Adam 1e-3, the best of all candidates, and the mean of its best 10 and 20 if there are.

    Args:
        default: the run at 1e-3, which is a candidate too.
        candidates: other settings.
        budget: up to which they are compared.
    """
    lines = [drawn(default, ADAM, budget)]
    tried = [
        drawn(run, Entry(run.config.method, _title(run), "adam", "adam", "tuned"), budget)
        for run in [default, *candidates]
    ]
    lines.append(min(tried, key=final_loss))
    finite = [each for each in tried if math.isfinite(final_loss(each))]
    for count, style in TOPS.items():
        if len(finite) >= count:
            mean = mean_of_top(finite, count, f"Adam, mean of its best {count}", style)
            lines.append({**mean, "method": "adam", "setting": f"top {count}"})
    return lines


def _title(run: Run) -> str:
    values = run.config.the_method().values
    halved = f", halved every {values['decay']:,}" if values["decay"] else ""
    return f"Adam, tuned: rate {written(values['rate'])}{halved}"
