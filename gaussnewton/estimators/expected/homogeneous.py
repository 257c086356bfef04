r"""Matrices between tensors with positions, all of which are alike.

Between position p of a tensor u and position q of a tensor v the matrix is taken to be

.. math:: M[u_p, v_q] = δ_{pq} D + B,

a part D of each position's own and a part B that all have in common. Both are kept, stacked as
``[2, a, b]``. D alone would be positions without correlation; B alone is what averaging over
positions leaves. Tensors with different numbers of positions share only B.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

Parts = Float[Tensor, "2 a b"]
"""D and B."""


def from_sums(
    same: Float[Tensor, "a b"] | None, all: Float[Tensor, "a b"], positions: tuple[int, int]
) -> Float[Tensor, "2 a b"]:
    r"""D and B, from sums of the true matrices: those are kept, whatever else is lost.

    Args:
        same: :math:`\sum_p M[u_p, v_p]`; None where the positions are not the same.
        all: :math:`\sum_{pq} M[u_p, v_q]`.
        positions: of u and of v.

    Example:
        >>> import torch
        >>> from gaussnewton.estimators.expected.homogeneous import from_sums
        >>> one = torch.ones(1, 1)
        >>> from_sums(3 * one, 3 * one, (3, 3)).squeeze()      # no correlation at all
        tensor([1., 0.])
        >>> from_sums(3 * one, 9 * one, (3, 3)).squeeze()      # all positions the same
        tensor([0., 1.])
    """
    u, v = positions
    if u == v == 1:
        return torch.stack([all, torch.zeros_like(all)])
    if u != v or same is None:
        return torch.stack([torch.zeros_like(all), all / (u * v)])
    B = (all - same) / (u * (u - 1))
    return torch.stack([same / u - B, B])


def sum_same(parts: Float[Tensor, "2 a b"], positions: int) -> Float[Tensor, "a b"]:
    """Σ_p M[u_p, v_p]."""
    return positions * (parts[0] + parts[1])


def sum_all(parts: Float[Tensor, "2 a b"], positions: tuple[int, int]) -> Float[Tensor, "a b"]:
    """Σ_pq M[u_p, v_q]."""
    u, v = positions
    return u * v * parts[1] + (u * parts[0] if u == v else 0)
