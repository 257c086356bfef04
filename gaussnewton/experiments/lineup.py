"""What the figures of progress show: which runs, and how a run becomes a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gaussnewton.experiments.budget import Budget
from gaussnewton.experiments.figures.progress import final_loss, mean_of_top
from gaussnewton.experiments.methods import Method, written
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
"""Beside 1e-3, which is about 2^-10; always among those that tuned Adam is chosen from."""

TUNED = "Adam, tuned"

TOPS = {10: "adam dashed", 20: "adam dashdot"}

LOSSES = (
    "The loss is that of 5,000 training data, the same for all; for methods with curvature that of "
    "the averaged parameters (appendix B.4), or of the present ones while the average lags behind."
)

CPU_DEPARTS = (
    "The paper's figure has binary cross-entropy on all three data sets, and the exact inversion "
    "beside the factored one; here FACES has squared error, and the inversion is the factored one."
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
        "window": 1, "threads": [run.config.threads],
    }  # fmt: skip


def _loss(line: Line) -> float | None:
    known = [line[key] for key in ("loss", "averaged_loss") if line.get(key) is not None]
    return min(known, default=None)


def adam_lines(default: Run, candidates: Sequence[Run], budget: Budget) -> list[Drawn]:
    """Adam 1e-3, the best of all candidates, and the mean of its best 10 and 20 if there are.

    Args:
        default: the run at 1e-3, which is a candidate too.
        candidates: other settings, each once.
        budget: up to which they are compared.

    Returns:
        Lines of a figure; that of the tuned one says of how many settings it is the best, as
        ``tuned_of``.
    """
    lines = [drawn(default, ADAM, budget)]
    tried = [
        drawn(run, Entry(run.config.method, _title(run), "adam", "adam", "tuned"), budget)
        for run in [default, *candidates]
    ]
    best = min(tried, key=final_loss)
    lines.append({**best, "tuned_of": len(tried)})
    finite = [each for each in tried if math.isfinite(final_loss(each))]
    for count, style in TOPS.items():
        if len(finite) >= count:
            mean = mean_of_top(finite, count, f"Adam, mean of its best {count}", style)
            threads = sorted({each for run in finite for each in run["threads"]})
            of = {"method": "adam", "setting": f"top {count}", "threads": threads}
            lines.append({**mean, **of})
    return lines


def setting_of(method: Method, updates: int) -> tuple[float, int | None]:
    """What a setting of Adam comes to in so many updates: its rate, and when that is halved.

    A rate that would be halved only after them is not halved at all, however that was written.

    Example:
        >>> from gaussnewton.experiments.lineup import setting_of
        >>> from gaussnewton.experiments.methods import method
        >>> [setting_of(method(f"adam:rate=0.5{more}"), 20) for more in ("", ",decay=20")]
        [(0.5, None), (0.5, None)]
    """
    period = method.values["decay"]
    return method.values["rate"], None if period is None or period >= updates else period


def titled_alike(lines: Sequence[Drawn]) -> tuple[list[Drawn], str]:
    """Lines of one problem of several in a figure, and what their tuned Adam is.

    It has other rates for each problem, and in a legend for all of them but one entry.
    """
    mine = [{**each, "title": TUNED} if each["setting"] == "tuned" else each for each in lines]
    said = next((each["title"] for each in lines if each["setting"] == "tuned"), "")
    return mine, said.removeprefix(f"{TUNED}: ")


def threads_text(lines: Sequence[Drawn]) -> str:
    """How many threads of torch runs had.

    Example:
        >>> from gaussnewton.experiments.lineup import threads_text
        >>> threads_text([{"threads": [1]}]), threads_text([{"threads": [4]}, {"threads": [2]}])
        ('1 thread', '2 or 4 threads')
    """
    counts = sorted({count for each in lines for count in each["threads"]})
    return f"{' or '.join(map(str, counts))} thread{'' if counts == [1] else 's'}"


def _title(run: Run) -> str:
    values = run.config.the_method().values
    halved = f", halved every {values['decay']:,}" if values["decay"] else ""
    return f"{TUNED}: rate {written(values['rate'])}{halved}"
