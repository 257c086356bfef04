"""Diagonal form: losses that treat each output by itself."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.perdatum.base import PerDatum
from gaussnewton.perdatum.roots import Roots
from gaussnewton.perdatum.shared import Shared
from gaussnewton.precision import widened
from gaussnewton.tiles import tiled_diagonal


class Diagonal(PerDatum):
    """M_n = diag(s_n) with s_n >= 0.

    Args:
        values: s, one row for each datum; or a single row that all data share, as
            squared error has it.
        data: how many data there are.
    """

    def __init__(self, values: Float[Tensor, "rows d"], data: int) -> None:
        self.values = values
        self.data, self.width = data, values.shape[1]
        self.is_shared = values.shape[0] == 1

    @property
    def rank(self) -> int:
        return self.width

    def total(self) -> Float[Tensor, "d d"]:
        return self.tiled_total(None)

    def tiled_total(self, largest: int | None) -> Float[Tensor, "d b"]:
        total = self.values.sum(0)
        return tiled_diagonal(total * self.data if self.is_shared else total, largest)

    def product(self, v: Float[Tensor, "*k n d"]) -> Float[Tensor, "*k n d"]:
        return self.values * v

    def scale(self, slope: Float[Tensor, "n d"]) -> Diagonal:
        return Diagonal(self.values * slope.square(), self.data)

    def pull(self, W: Float[Tensor, "d e"]) -> PerDatum:
        root = self.values.sqrt()
        if self.is_shared:
            return Shared(root.T * W, self.data)
        return Roots(root.unsqueeze(2) * W)

    def roots(self) -> Roots:
        rows = torch.diag_embed(self.values.sqrt())
        return Roots(rows.expand(self.data, -1, -1).contiguous())

    def widened(self) -> Diagonal:
        return Diagonal(widened(self.values), self.data)

    def select(self, part: slice) -> Diagonal:
        data = len(range(*part.indices(self.data)))
        return Diagonal(self.values if self.is_shared else self.values[part], data)

    def diagonal_in(self, U: Float[Tensor, "d e"]) -> Float[Tensor, "n e"]:
        return (self.values @ U.square()).expand(self.data, -1)
