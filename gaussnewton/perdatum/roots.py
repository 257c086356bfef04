"""Low-rank form: each matrix by the rows of a square root."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from gaussnewton.perdatum.base import PerDatum, Pullback
from gaussnewton.precision import widened
from gaussnewton.tiles import tiled_gram


class Roots(PerDatum):
    r"""M_n = R_nᵀ R_n with r rows each.

    The rows are the paper's :math:`C_λ^k` (section 3.4), and a move backwards is its
    recursion :math:`C_λ^k = B_λ W_{λ+1}^T C_{λ+1}^k`, for all data and all k in one product.
    """

    def __init__(self, rows: Float[Tensor, "n r d"]) -> None:
        self.rows = rows
        self.data, _, self.width = rows.shape

    @property
    def rank(self) -> int:
        return min(self.rows.shape[1], self.width)

    def total(self) -> Float[Tensor, "d d"]:
        return self.tiled_total(None)

    def tiled_total(self, largest: int | None) -> Float[Tensor, "d b"]:
        return tiled_gram(self.rows.flatten(0, 1), largest)

    def product(self, v: Float[Tensor, "*k n d"]) -> Float[Tensor, "*k n d"]:
        inner = (self.rows @ v.unsqueeze(-1)).squeeze(-1)
        return (inner.unsqueeze(-2) @ self.rows).squeeze(-2)

    def scale(self, slope: Float[Tensor, "n d"]) -> Roots:
        return Roots(self.rows.mul_(slope.unsqueeze(1)))

    def pull(self, W: Float[Tensor, "d e"]) -> Roots:
        return Roots((self.rows.flatten(0, 1) @ W).unflatten(0, self.rows.shape[:2]))

    def pull_through(self, pullback: Pullback) -> Roots:
        columns = pullback(self.rows.transpose(0, 1).contiguous())
        return Roots(columns.transpose(0, 1).contiguous())

    def roots(self) -> Roots:
        return self

    def widened(self) -> Roots:
        return Roots(widened(self.rows))

    def select(self, part: slice) -> Roots:
        return Roots(self.rows[part].clone())
