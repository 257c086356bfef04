"""From marks along a run to seconds and updates at which it reached a loss, over seeds."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Mark = Sequence[Any]
"""(updates, seconds, loss, …), the first before any update; None for a loss that is no number."""


@dataclass(frozen=True)
class Reached:
    """When a loss was reached, in seconds and updates; infinite if it was not."""

    seconds: float
    updates: float

    @property
    def ever(self) -> bool:
        """Whether it was."""
        return math.isfinite(self.seconds)


NEVER = Reached(math.inf, math.inf)


def loss_of(mark: Mark) -> float:
    """A mark's loss; infinite where it is no number."""
    loss = mark[2]
    return loss if loss is not None and math.isfinite(loss) else math.inf


def reached(marks: Sequence[Mark], target: float) -> Reached:
    """When the loss first was no greater than the target, between two marks if need be.

    Between two marks the logarithm of the loss is taken to fall along a line, as it does about
    where losses are exponential in time. A rise after that does not count.

    >>> reached([(0, 0.0, 16.0), (10, 5.0, 4.0), (20, 10.0, 1.0)], 2.0)
    Reached(seconds=7.5, updates=15.0)
    """
    for i, mark in enumerate(marks):
        loss = loss_of(mark)
        if loss > target:
            continue
        if i == 0:
            return Reached(float(mark[1]), float(mark[0]))
        before = marks[i - 1]
        share = _share(loss_of(before), loss, target)
        return Reached(
            before[1] + share * (mark[1] - before[1]), before[0] + share * (mark[0] - before[0])
        )
    return NEVER


def _share(before: float, after: float, target: float) -> float:
    """How far on the way from one loss to another the target lies, by logarithms."""
    if not math.isfinite(before) or after <= 0:
        return 1.0
    return math.log(before / target) / math.log(before / after)


def median(values: Sequence[float]) -> float:
    """The median, where runs that never arrived count as infinite and are not left out.

    With an even number of values it is the mean of the two in the middle; infinite if one is.

    >>> median([3.0, math.inf, 1.0]), median([1.0, math.inf])
    (3.0, inf)
    """
    return statistics.median(values) if values else math.inf


def medians(runs: Sequence[Sequence[Mark]], targets: Sequence[float]) -> Reached:
    """The medians over seeds of seconds and of updates, each seed with its own target."""
    found = [reached(marks, target) for marks, target in zip(runs, targets, strict=True)]
    return Reached(
        median([each.seconds for each in found]), median([each.updates for each in found])
    )


def loss_at(marks: Sequence[Mark], seconds: float) -> float:
    """The loss at a moment, between two marks by logarithms; NaN beyond the last one.

    >>> round(loss_at([(0, 0.0, 16.0), (10, 5.0, 4.0)], 2.5), 6)
    8.0
    """
    times = [mark[1] for mark in marks]
    if not marks or seconds < times[0] or seconds > times[-1]:
        return math.nan
    i = bisect_right(times, seconds)
    if i == len(marks):
        return loss_of(marks[-1])
    a, b = loss_of(marks[i - 1]), loss_of(marks[i])
    share = (seconds - times[i - 1]) / (times[i] - times[i - 1])
    if not (math.isfinite(a) and math.isfinite(b) and a > 0 and b > 0):
        return b if share == 1 else a
    return math.exp((1 - share) * math.log(a) + share * math.log(b))


def band(runs: Sequence[Sequence[Mark]], times: Sequence[float]) -> list[tuple[float, ...]]:
    """(seconds, least, median, greatest) over the runs, at the moments that all of them have."""
    found = []
    for seconds in times:
        losses = [loss_at(marks, seconds) for marks in runs]
        if losses and all(math.isfinite(loss) for loss in losses):
            found.append((seconds, min(losses), statistics.median(losses), max(losses)))
    return found
