"""Looking for local maxima of a piecewise smooth function, where it is smooth and at its kinks.

A ReLU network is smooth at θ if no pre-activation of any datum changes its sign around θ. Lemma 2
says that its error has no strict local maximum there; at a kink it may.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_AROUND = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]


def maxima_on_grid(
    E: Float[Tensor, "rows columns"], pattern: Bool[Tensor, "rows columns units"]
) -> dict[str, Any]:
    """Strict local maxima among the inner points of a grid.

    A point counts as smooth if its eight neighbours have its pattern. It is a maximum if it lies
    above all eight by more than rounding.

    Args:
        E: The values.
        pattern: Which units of which data are on, at each point.

    Returns:
        ``points``, ``smooth``, ``kinks`` (the rest), ``maxima_smooth`` and ``maxima_kinks``; and
        ``places``, the indices [row, column] of all maxima.

    Example:
        >>> import torch
        >>> from gaussnewton.experiments.figures.maxima import maxima_on_grid
        >>> axis = torch.linspace(-1, 1, 5)
        >>> hill = -(axis[:, None].square() + axis.square())
        >>> found = maxima_on_grid(hill, torch.ones(5, 5, 1, dtype=torch.bool))
        >>> found["points"], found["maxima_smooth"], found["places"]
        (9, 1, [[2, 2]])
    """
    middle, own = E[1:-1, 1:-1], pattern[1:-1, 1:-1]
    rows, columns = E.shape
    smooth = torch.ones_like(middle, dtype=torch.bool)
    highest = torch.full_like(middle, -torch.inf)
    for i, j in _AROUND:
        there = slice(1 + i, rows - 1 + i), slice(1 + j, columns - 1 + j)
        smooth &= (pattern[there] == own).all(-1)
        highest = torch.maximum(highest, E[there])
    found = middle > highest + _rounding(E)
    return {
        **_counts(smooth, found),
        "places": (found.nonzero() + 1).tolist(),
    }


def maxima_on_lines(
    before: Float[Tensor, " count"],
    middle: Float[Tensor, " count"],
    after: Float[Tensor, " count"],
    smooth: Bool[Tensor, " count"],
) -> dict[str, Any]:
    """Strict local maxima among the middles of three points on a line, and concave middles.

    Returns:
        As :func:`maxima_on_grid`, without places; and ``concave_smooth``, ``concave_kinks``:
        where the second difference is below zero. Along one layer's weights it never is where the
        network is smooth (lemma 1).
    """
    rounding = _rounding(middle)
    found = middle > torch.maximum(before, after) + rounding
    concave = before + after - 2 * middle < -4 * rounding
    return {
        **_counts(smooth, found),
        "concave_smooth": int((concave & smooth).sum()),
        "concave_kinks": int((concave & ~smooth).sum()),
    }


def _counts(smooth: Tensor, found: Tensor) -> dict[str, Any]:
    return {
        "points": smooth.numel(),
        "smooth": int(smooth.sum()),
        "kinks": int((~smooth).sum()),
        "maxima_smooth": int((found & smooth).sum()),
        "maxima_kinks": int((found & ~smooth).sum()),
    }


def _rounding(E: Tensor) -> float:
    return 16 * torch.finfo(E.dtype).eps * float(E.abs().max())
