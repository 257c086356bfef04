"""A diagonal block: for parameters that are many and have no matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks.base import Block, Inverse, Inversion
from gaussnewton.errors import FactorisationError


@dataclass(frozen=True, eq=False)
class DiagonalBlock(Block):
    """C = diag(vec(D)).

    Attributes:
        D: the diagonal, in the shape of the layer's matrix.

    Example:
        >>> import torch, gaussnewton as gn
        >>> block = gn.DiagonalBlock(torch.tensor([[1.0, 3.0]]))
        >>> block.solve(torch.ones(1, 2), damping=1.0)
        tensor([[0.5000, 0.2500]])
    """

    D: Float[Tensor, "rows columns"]

    @property
    def rows(self) -> int:  # type: ignore[override]
        """Of the layer's matrix."""
        return self.D.shape[0]

    @property
    def columns(self) -> int:  # type: ignore[override]
        """Of the layer's matrix."""
        return self.D.shape[1]

    def __matmul__(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        return self.D * V.to(self.D.dtype)

    def invert(self, damping: float, inversion: Inversion = "exact") -> Inverse:
        """The inverse of C + damping · I; there is nothing to factor."""
        del inversion
        if damping < 0:
            raise ValueError(f"damping must not be negative, got {damping}")
        damped = self.D + damping
        if not bool((damped > 0).all()):
            raise FactorisationError(
                "the block is singular and there is no damping: give a damping above zero."
            )
        return DiagonalInverse(damped)

    def dense(self) -> Float[Tensor, "size size"]:
        return self.D.T.reshape(-1).diag()

    def trace(self) -> Float[Tensor, ""]:
        return self.D.sum()

    def scaled(self, factor: float) -> DiagonalBlock:
        return DiagonalBlock(self.D * factor)

    @property
    def kind(self) -> str:
        return "diagonal"

    def numbers(self) -> dict[str, Tensor]:
        return {"D": self.D}

    def with_numbers(self, numbers: Mapping[str, Tensor]) -> DiagonalBlock:
        return DiagonalBlock(numbers["D"])

    def average(self, newer: DiagonalBlock, decay: float) -> DiagonalBlock:
        return DiagonalBlock(newer.D.lerp(self.D, decay))

    def merge(
        self, other: DiagonalBlock, data: tuple[int, int], shares: tuple[float, float]
    ) -> DiagonalBlock:
        del data
        return DiagonalBlock(self.D * shares[0] + other.D * shares[1])

    def state_dict(self) -> dict[str, Any]:
        return {"type": "diagonal", "D": self.D}


@dataclass(frozen=True, eq=False)
class DiagonalInverse(Inverse):
    """Division by the damped diagonal."""

    damped: Float[Tensor, "rows columns"]

    def solve(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        return V.to(self.damped.dtype) / self.damped

    def logdet(self) -> Float[Tensor, ""]:
        return self.damped.log().sum()

    def sample(self, generator: torch.Generator | None = None) -> Float[Tensor, "rows columns"]:
        noise = torch.empty_like(self.damped).normal_(generator=generator)
        return noise / self.damped.sqrt()
