"""Products of a matrix with its own transpose."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.precision import widened

# Panels narrower than this lose more to the multiplication's start than they save; measured
# on CPU, where the product of 9000 × 1000 takes 0.7 of the time of a full multiplication.
_PANEL = 200
# Of fewer rows than this, mirroring a panel takes longer than multiplying it; measured there too.
_ROWS = 256


def gram(
    rows: Float[Tensor, "n d"], scale: float = 1.0, out: Float[Tensor, "d d"] | None = None
) -> Float[Tensor, "d d"]:
    """The Gram matrix scale · XᵀX of rows X, in float32 or wider.

    Args:
        rows: X.
        scale: a factor, at no cost.
        out: where to write, of the widened dtype.

    Example:
        >>> import torch
        >>> from gaussnewton.gram import gram
        >>> x = torch.randn(5, 3, dtype=torch.float64)
        >>> torch.allclose(gram(x), x.T @ x)
        True
    """
    rows = widened(rows)
    return symmetric_product(rows, rows, scale, out)


def bordered_gram(rows: Float[Tensor, "n d"], scale: float = 1.0) -> Float[Tensor, "d+1 d+1"]:
    """The Gram matrix of rows X with a 1 at the end of each, without writing them again.

    Example:
        >>> import torch
        >>> from gaussnewton.gram import bordered_gram, gram
        >>> x = torch.randn(5, 3, dtype=torch.float64)
        >>> torch.allclose(bordered_gram(x), gram(torch.cat([x, torch.ones_like(x[:, :1])], 1)))
        True
    """
    rows = widened(rows)
    n, d = rows.shape
    result = rows.new_empty(d + 1, d + 1)
    gram(rows, scale, out=result[:-1, :-1])
    # faster than a sum over rows
    result[-1, :-1] = result[:-1, -1] = torch.mv(rows.T, rows.new_full((n,), scale))
    result[-1, -1] = n * scale
    return result


def symmetric_product(
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "n d"],
    scale: float = 1.0,
    out: Float[Tensor, "d d"] | None = None,
) -> Float[Tensor, "d d"]:
    """scale · LᵀR, for L and R whose product is known to be symmetric.

    Only the panels on and above the diagonal are multiplied; the rest is mirrored.
    """
    d = left.shape[1]
    result = left.new_empty(d, d) if out is None else out
    for start, stop in panels(len(left), d):
        panel = result[start:stop, start:]
        torch.addmm(panel, left[:, start:stop].T, right[:, start:], beta=0, alpha=scale, out=panel)
        result[stop:, start:stop] = result[start:stop, stop:].T
    return result


def panels(n: int, d: int) -> Iterator[tuple[int, int]]:
    """Where the panels begin and end that the product of n rows is computed in."""
    count = max(1, round(d / _PANEL)) if n >= _ROWS else 1
    return pairwise(i * d // count for i in range(count + 1))
