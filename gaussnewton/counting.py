"""How many operations and bytes a block takes, from its size alone.

Operations are those of floating point, a multiplication and an addition being two. What is counted
is what the code does: the symmetric products of :mod:`gaussnewton.gram`, Cholesky factors, and two
triangular solves for each factor and each column of a gradient. A bias counts as any other column.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gaussnewton.blocks import (
    Block,
    DenseBlock,
    EigenBlock,
    GroupedBlock,
    KroneckerBlock,
    ScaledBlock,
    TiledBlock,
)
from gaussnewton.gram import panels
from gaussnewton.tiles import stacks


@dataclass(frozen=True)
class Count:
    """What one block takes.

    Attributes:
        moments: operations to estimate its factors from so many positions.
        inversion: operations to factorise it.
        solve: operations for one preconditioned gradient.
        bytes: of its numbers; its inverse takes as many again.
    """

    moments: int = 0
    inversion: int = 0
    solve: int = 0
    bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.moments + other.moments,
            self.inversion + other.inversion,
            self.solve + other.solve,
            self.bytes + other.bytes,
        )


def count(block: Block, positions: int) -> Count:
    """What a block takes that is estimated from so many positions, one vector at each.

    As KFAC with one sample and positions taken for data of their own has it. The block may be one
    without numbers, on the device "meta", as that of a model too large to be built.

    Args:
        block: of any kind.
        positions: data times places of each datum where the layer is used.

    Example:
        >>> import torch, gaussnewton as gn
        >>> from gaussnewton.counting import count
        >>> count(gn.KroneckerBlock(Q=torch.eye(3), G=torch.eye(2)), positions=10)
        Count(moments=260, inversion=11, solve=60, bytes=52)
    """
    size = sum(part.numel() * part.element_size() for part in block.numbers().values())
    if isinstance(block, GroupedBlock):
        total = Count()
        for part in block.parts:
            total = total + count(part, positions)
        return total
    if isinstance(block, KroneckerBlock | TiledBlock | EigenBlock):
        Q, G = _tiles(block.Q), _tiles(block.G)
        entries = block.rows * block.columns
        return Count(
            moments=sum(_gram(positions, d) for d in (*Q, *G)),
            inversion=sum(d**3 // 3 for d in (*Q, *G)),
            solve=2 * block.rows * _squares(Q) + 2 * block.columns * _squares(G),
            bytes=size + (4 * entries if isinstance(block, EigenBlock) else 0),
        )
    if isinstance(block, ScaledBlock):
        d = block.columns
        return Count(_gram(positions, d), 9 * d**3, 4 * block.rows * d**2, size)
    if isinstance(block, DenseBlock):
        d = block.rows * block.columns
        return Count(_gram(positions, d), d**3 // 3, 2 * d**2, size)
    entries = block.rows * block.columns
    return Count(2 * positions * entries, entries, entries, size)


def _tiles(T: Tensor) -> list[int]:
    return [tiles.shape[1] for _, tiles in stacks(T) for _ in range(len(tiles))]


def _squares(sizes: list[int]) -> int:
    return sum(d**2 for d in sizes)


def _gram(rows: int, d: int) -> int:
    """The panels on and above the diagonal."""
    return sum(2 * rows * (stop - start) * (d - start) for start, stop in panels(rows, d))
