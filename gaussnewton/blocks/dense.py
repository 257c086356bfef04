"""A block written out: exact, and only for small layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks.base import Block, Inverse, Inversion, cholesky


@dataclass(frozen=True, eq=False)
class DenseBlock(Block):
    """C itself, ``[rows · columns, rows · columns]``, vec going column by column.

    Example:
        >>> import torch, gaussnewton as gn
        >>> block = gn.DenseBlock(3 * torch.eye(6), rows=2, columns=3)
        >>> (block @ torch.ones(2, 3))[0]
        tensor([3., 3., 3.])
    """

    matrix: Float[Tensor, "size size"]
    rows: int
    columns: int

    def __matmul__(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        return _unvec(self.matrix @ _vec(V).to(self.matrix.dtype), V)

    def dense(self) -> Float[Tensor, "size size"]:
        return self.matrix

    def trace(self) -> Float[Tensor, ""]:
        return self.matrix.trace()

    def invert(self, damping: float, inversion: Inversion = "exact") -> Inverse:
        """The inverse of C + damping · I, which must be positive definite."""
        if damping < 0:
            raise ValueError(f"damping must not be negative, got {damping}")
        del inversion  # there are no factors to share damping out to
        damped = self.matrix.clone()
        damped.diagonal().add_(damping)
        return CholeskyInverse(cholesky(damped, "the damped block"), self.rows, self.columns)

    def scaled(self, factor: float) -> DenseBlock:
        return DenseBlock(self.matrix * factor, self.rows, self.columns)

    @property
    def kind(self) -> str:
        return "dense"

    def numbers(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    def with_numbers(self, numbers: Mapping[str, Tensor]) -> DenseBlock:
        return DenseBlock(numbers["matrix"], self.rows, self.columns)

    def average(self, newer: DenseBlock, decay: float) -> DenseBlock:
        return DenseBlock(newer.matrix.lerp(self.matrix, decay), self.rows, self.columns)

    def merge(
        self, other: DenseBlock, data: tuple[int, int], shares: tuple[float, float]
    ) -> DenseBlock:
        del data
        matrix = self.matrix * shares[0] + other.matrix * shares[1]
        return DenseBlock(matrix, self.rows, self.columns)

    def state_dict(self) -> dict[str, Any]:
        return {
            "type": "dense",
            "matrix": self.matrix,
            "rows": self.rows,
            "columns": self.columns,
        }


@dataclass(frozen=True, eq=False)
class CholeskyInverse(Inverse):
    """(C + k I)⁻¹ by its Cholesky factor."""

    L: Float[Tensor, "size size"]
    rows: int
    columns: int

    def solve(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        return _unvec(torch.cholesky_solve(_vec(V).to(self.L.dtype)[:, None], self.L), V)

    def logdet(self) -> Float[Tensor, ""]:
        return 2 * self.L.diagonal().log().sum()

    def sample(self, generator: torch.Generator | None = None) -> Float[Tensor, "rows columns"]:
        Z = torch.randn(
            self.L.shape[0], 1, generator=generator, dtype=self.L.dtype, device=self.L.device
        )
        x = torch.linalg.solve_triangular(self.L.T, Z, upper=True)
        return x.reshape(self.columns, self.rows).T


def _vec(V: Tensor) -> Tensor:
    return V.T.reshape(-1)


def _unvec(v: Tensor, like: Tensor) -> Tensor:
    return v.reshape(like.shape[1], like.shape[0]).T
