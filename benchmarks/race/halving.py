"""The best of a grid by successive halving."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from race.settings import Setting

QUARTER = 4
"""Of each rung the best of so many go on, with so many times the seconds."""

RUNGS = 2
AT_LEAST = 2
"""So many go on in any case, if there are as many."""

Trial = Callable[[Setting, float], float]
"""The loss of a setting after so many seconds."""


def rungs(count: int, seconds: float) -> list[tuple[int, float]]:
    """How many settings are tried for how many seconds each.

    >>> rungs(40, 15.0), rungs(4, 15.0), rungs(1, 15.0)
    ([(40, 15.0), (10, 60.0)], [(4, 15.0), (2, 60.0)], [])
    """
    if count < 2:
        return []
    found = [(count, seconds)]
    while len(found) < RUNGS:
        count = min(count, max(AT_LEAST, math.ceil(count / QUARTER)))
        seconds *= QUARTER
        found.append((count, seconds))
    return found


def best_of(grid: Sequence[Setting], trial: Trial, seconds: float) -> Setting:
    """Try all settings, the best of them for longer, and take the best of those.

    A loss that is no number is the worst; of equal ones the first in the grid is taken.
    """
    ranked = list(grid)
    for count, budget in rungs(len(grid), seconds):
        losses = [(_orderly(trial(each, budget)), i) for i, each in enumerate(ranked[:count])]
        ranked = [ranked[i] for _, i in sorted(losses)]
    return ranked[0]


def _orderly(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf
