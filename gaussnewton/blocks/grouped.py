"""Several blocks side by side, each for some rows of a layer's matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks.base import Block, Inverse, Inversion
from gaussnewton.blocks.eigen import EigenBlock
from gaussnewton.blocks.kronecker import KroneckerBlock
from gaussnewton.blocks.tiled import TiledBlock, of_factors

Pairs = Iterable[tuple[Any, Any]]
"""Parts of two blocks that belong together, and are of one kind."""


@dataclass(frozen=True, eq=False)
class GroupedBlock(Block):
    """Block-diagonal over groups of rows, as the curvature of a convolution with groups is.

    Attributes:
        parts: for each group of rows, from the first on, its own block; all of one kind.

    Example:
        >>> import torch, gaussnewton as gn
        >>> part = gn.KroneckerBlock(Q=torch.eye(3), G=torch.eye(2))
        >>> block = gn.GroupedBlock((part, part))
        >>> block.rows, block.columns, (block @ torch.ones(4, 3)).sum().item()
        (4, 3, 12.0)
    """

    parts: tuple[KroneckerBlock | EigenBlock | TiledBlock, ...]

    @property
    def rows(self) -> int:  # type: ignore[override]
        """Of all groups together."""
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:  # type: ignore[override]
        """Of any group."""
        return self.parts[0].columns

    def __matmul__(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        pieces = zip(self.parts, self._split(V), strict=True)
        return torch.cat([part @ piece for part, piece in pieces])

    def invert(self, damping: float, inversion: Inversion = "exact") -> Inverse:
        """The inverse of C + damping · I, group by group."""
        return GroupedInverse(
            tuple(part.invert(damping, inversion) for part in self.parts),
            tuple(part.rows for part in self.parts),
        )

    def dense(self) -> Float[Tensor, "size size"]:
        whole = torch.block_diag(*(part.dense() for part in self.parts))
        # Each part goes through its rows column by column; the whole through all rows.
        start, order = 0, []
        for part in self.parts:
            numbers = torch.arange(start, start + part.rows * part.columns)
            order.append(numbers.reshape(part.columns, part.rows))
            start += part.rows * part.columns
        permutation = torch.cat(order, dim=1).reshape(-1)
        return whole[permutation][:, permutation]

    def trace(self) -> Float[Tensor, ""]:
        return torch.stack([part.trace() for part in self.parts]).sum()

    def scaled(self, factor: float) -> GroupedBlock:
        return GroupedBlock(tuple(part.scaled(factor) for part in self.parts))

    @property
    def kind(self) -> str:
        return f"{self.parts[0].kind}, {len(self.parts)} groups"

    def numbers(self) -> dict[str, Tensor]:
        each = [part.numbers() for part in self.parts]
        return {key: torch.stack([numbers[key] for numbers in each]) for key in each[0]}

    def to(self, dtype: torch.dtype) -> GroupedBlock:
        return GroupedBlock(tuple(part.to(dtype) for part in self.parts))  # type: ignore[misc]

    def with_numbers(self, numbers: Mapping[str, Tensor]) -> GroupedBlock:
        return GroupedBlock(
            tuple(
                part.with_numbers({key: stacked[i] for key, stacked in numbers.items()})
                for i, part in enumerate(self.parts)
            )
        )

    @classmethod
    def of(cls, Q: Float[Tensor, "g c q"], G: Float[Tensor, "g r s"]) -> GroupedBlock:
        """From the factors of all groups, stacked."""
        return cls(tuple(of_factors(q, g) for q, g in zip(Q, G, strict=True)))

    @property
    def Q(self) -> Float[Tensor, "g c q"]:
        """The factors Q of all groups, stacked."""
        return torch.stack([part.Q for part in self.parts])

    @property
    def G(self) -> Float[Tensor, "g r s"]:
        """The factors G of all groups, stacked."""
        return torch.stack([part.G for part in self.parts])

    def average(self, newer: GroupedBlock, decay: float) -> GroupedBlock:
        pairs: Pairs = zip(self.parts, newer.parts, strict=True)
        return GroupedBlock(tuple(mine.average(other, decay) for mine, other in pairs))

    def merge(
        self, other: GroupedBlock, data: tuple[int, int], shares: tuple[float, float]
    ) -> GroupedBlock:
        pairs: Pairs = zip(self.parts, other.parts, strict=True)
        return GroupedBlock(tuple(mine.merge(theirs, data, shares) for mine, theirs in pairs))

    def state_dict(self) -> dict[str, Any]:
        return {"type": "grouped", "parts": [part.state_dict() for part in self.parts]}

    def _split(self, V: Tensor) -> Sequence[Tensor]:
        return V.split([part.rows for part in self.parts])


@dataclass(frozen=True, eq=False)
class GroupedInverse(Inverse):
    """The inverses of the groups."""

    parts: tuple[Inverse, ...]
    sizes: tuple[int, ...]

    def solve(self, V: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        pieces = zip(self.parts, V.split(list(self.sizes)), strict=True)
        return torch.cat([part.solve(piece) for part, piece in pieces])

    def multiplied_out(self, choices: Sequence[torch.dtype] = ()) -> GroupedInverse:
        return GroupedInverse(tuple(p.multiplied_out(choices) for p in self.parts), self.sizes)

    @property
    def condition(self) -> float:
        return max(part.condition for part in self.parts)

    def logdet(self) -> Float[Tensor, ""]:
        return torch.stack([part.logdet() for part in self.parts]).sum()

    def sample(self, generator: torch.Generator | None = None) -> Float[Tensor, "rows columns"]:
        return torch.cat([part.sample(generator) for part in self.parts])
