"""Shared form: one matrix for all data, but for a scaling of its sides."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from gaussnewton.perdatum.base import PerDatum
from gaussnewton.perdatum.roots import Roots
from gaussnewton.precision import widened
from gaussnewton.tiles import tiled_gram


class Shared(PerDatum):
    """M_n = B_n RᵀR B_n with the same R for all data and B_n = diag(slope_n).

    This is what a loss of constant Hessian becomes behind the last layer. Its sum is
    (RᵀR) ⊙ Σ_n slope_n slope_nᵀ, so KFRA's rule is exact for that one layer.
    """

    def __init__(
        self,
        rows: Float[Tensor, "r d"],
        data: int,
        slope: Float[Tensor, "n d"] | None = None,
    ) -> None:
        self.rows, self.slope = rows, slope
        self.data, self.width = data, rows.shape[1]

    @property
    def rank(self) -> int:
        return min(self.rows.shape)

    def total(self) -> Float[Tensor, "d d"]:
        return self.tiled_total(None)

    def tiled_total(self, largest: int | None) -> Float[Tensor, "d b"]:
        M = tiled_gram(self.rows, largest)
        return M * self.data if self.slope is None else M * tiled_gram(self.slope, largest)

    def product(self, v: Float[Tensor, "*k n d"]) -> Float[Tensor, "*k n d"]:
        B = 1.0 if self.slope is None else self.slope
        return ((v * B) @ self.rows.T @ self.rows) * B

    def scale(self, slope: Float[Tensor, "n d"]) -> Shared:
        both = slope if self.slope is None else self.slope * slope
        return Shared(self.rows, self.data, both)

    def pull(self, W: Float[Tensor, "d e"]) -> PerDatum:
        return Shared(self.rows @ W, self.data) if self.slope is None else self.roots().pull(W)

    def roots(self) -> Roots:
        if self.slope is None:
            return Roots(self.rows.expand(self.data, -1, -1).contiguous())
        return Roots(self.rows * self.slope.unsqueeze(1))

    def widened(self) -> Shared:
        return Shared(
            widened(self.rows), self.data, None if self.slope is None else widened(self.slope)
        )

    def select(self, part: slice) -> Shared:
        data = len(range(*part.indices(self.data)))
        return Shared(self.rows, data, None if self.slope is None else self.slope[part])

    def diagonal_in(self, U: Float[Tensor, "d e"]) -> Float[Tensor, "n e"]:
        if self.slope is not None:
            return super().diagonal_in(U)
        return (self.rows @ U).square().sum(0).expand(self.data, -1)
