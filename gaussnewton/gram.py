"""Products of a matrix with its own transpose."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float
from torch import Tensor

# Below this width one multiplication of the whole beats the panels; measured on CPU.
_PANEL = 200


def gram(rows: Float[Tensor, "n d"]) -> Float[Tensor, "d d"]:
    """The Gram matrix XᵀX of rows X, in float32 or wider.

    Only the lower triangle is multiplied, in panels of columns, and then mirrored: the
    result is exactly symmetric and costs a little over half of a full product.

    Example:
        >>> import torch
        >>> from gaussnewton.gram import gram
        >>> x = torch.randn(5, 3, dtype=torch.float64)
        >>> torch.allclose(gram(x), x.T @ x)
        True
    """
    rows = widened(rows)
    d = rows.shape[1]
    panels = max(1, round(d / _PANEL))
    if panels == 1:
        product = rows.T @ rows
        return (product + product.T).mul_(0.5)
    result = rows.new_empty(d, d)
    edges = [i * d // panels for i in range(panels + 1)]
    for start, stop in itertools.pairwise(edges):
        panel = rows[:, start:].T @ rows[:, start:stop]
        result[start:, start:stop] = panel
        result[start:stop, start:] = panel.T
    return result


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float32 where it is narrower, else as it is."""
    return tensor.float() if torch.finfo(tensor.dtype).bits < 32 else tensor
