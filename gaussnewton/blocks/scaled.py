"""The block of a table of vectors, of which each datum uses a few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks.base import Block, Inverse, Inversion
from gaussnewton.blocks.kronecker import eigh
from gaussnewton.errors import FactorisationError


@dataclass(frozen=True, eq=False)
class ScaledBlock(Block):
    """C = M ⊗ diag(f): each row has the same matrix, times how often the row is used.

    A Kronecker product with a diagonal factor, which may have as many rows as a vocabulary has
    words.

    Attributes:
        f: how often each row is used.
        M: acts on the columns; it carries the scale of the loss.

    Example:
        >>> import torch, gaussnewton as gn
        >>> block = gn.ScaledBlock(f=torch.tensor([1.0, 0.0]), M=2 * torch.eye(3))
        >>> block @ torch.ones(2, 3)
        tensor([[2., 2., 2.],
                [0., 0., 0.]])
    """

    f: Float[Tensor, " rows"]
    M: Float[Tensor, "columns columns"]

    @property
    def rows(self) -> int:  # type: ignore[override]
        """Of the table."""
        return self.f.shape[0]

    @property
    def columns(self) -> int:  # type: ignore[override]
        """The length of a vector."""
        return self.M.shape[0]

    def __matmul__(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        return self.f[:, None] * (V.to(self.M.dtype) @ self.M)

    def invert(self, damping: float, inversion: Inversion = "exact") -> Inverse:
        """The inverse of C + damping · I, exactly: it costs no more than any other."""
        del inversion
        if damping < 0:
            raise ValueError(f"damping must not be negative, got {damping}")
        values, U = eigh(self.M, "M")
        damped = torch.outer(self.f, values.clamp(min=0)) + damping
        if not bool((damped > 0).all()):
            raise FactorisationError(
                "the block is singular and there is no damping: give a damping above zero."
            )
        return ScaledInverse(U, damped)

    def dense(self) -> Float[Tensor, "size size"]:
        return torch.kron(self.M, self.f.diag())

    def trace(self) -> Float[Tensor, ""]:
        return self.f.sum() * self.M.trace()

    def scaled(self, factor: float) -> ScaledBlock:
        return ScaledBlock(self.f, self.M * factor)

    @property
    def kind(self) -> str:
        return "Kronecker, one factor diagonal"

    def numbers(self) -> dict[str, Tensor]:
        return {"f": self.f, "M": self.M}

    def with_numbers(self, numbers: Mapping[str, Tensor]) -> ScaledBlock:
        return ScaledBlock(numbers["f"], numbers["M"])

    def average(self, newer: ScaledBlock, decay: float) -> ScaledBlock:
        return ScaledBlock(newer.f.lerp(self.f, decay), newer.M.lerp(self.M, decay))

    def merge(
        self, other: ScaledBlock, data: tuple[int, int], shares: tuple[float, float]
    ) -> ScaledBlock:
        mine, theirs = data
        f = (self.f * mine + other.f * theirs) / (mine + theirs)
        return ScaledBlock(f, self.M * shares[0] + other.M * shares[1])

    def state_dict(self) -> dict[str, Any]:
        return {"type": "scaled", "f": self.f, "M": self.M}


@dataclass(frozen=True, eq=False)
class ScaledInverse(Inverse):
    """In the eigenvectors of M, where every row is divided by its own numbers."""

    U: Float[Tensor, "columns columns"]
    damped: Float[Tensor, "rows columns"]

    def solve(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        return (V.to(self.U.dtype) @ self.U / self.damped) @ self.U.T

    def logdet(self) -> Float[Tensor, ""]:
        return self.damped.log().sum()

    def sample(self, generator: torch.Generator | None = None) -> Float[Tensor, "rows columns"]:
        noise = torch.empty_like(self.damped).normal_(generator=generator)
        return (noise / self.damped.sqrt()) @ self.U.T
