"""Blocks whose factors may be no wider than a limit."""

from __future__ import annotations

from gaussnewton.blocks.base import Block
from gaussnewton.blocks.eigen import EigenBlock
from gaussnewton.blocks.grouped import GroupedBlock
from gaussnewton.blocks.kronecker import KroneckerBlock
from gaussnewton.blocks.scaled import ScaledBlock
from gaussnewton.blocks.tiled import TiledBlock, of_factors
from gaussnewton.tiles import tiled


def bounded(block: Block, largest: int | None) -> Block:
    """The block itself if its factors keep to the limit, else one of their tiles.

    A block with corrected eigenvalues is left with those of its factors: its own belong to
    eigenvectors that go across tiles. Blocks without factors stay as they are.

    Args:
        block: as it is without a limit.
        largest: the limit; None for no limit.

    Example:
        >>> import torch, gaussnewton as gn
        >>> from gaussnewton.blocks.bounded import bounded
        >>> block = gn.KroneckerBlock(Q=torch.eye(5), G=torch.eye(2))
        >>> bounded(block, 5) is block, bounded(block, 3).kind
        (True, 'Kronecker in tiles, G 2 and Q 3 wide')
    """
    if largest is None:
        return block
    if isinstance(block, GroupedBlock):
        parts = tuple(bounded(part, largest) for part in block.parts)
        return GroupedBlock(
            tuple(p for p in parts if isinstance(p, KroneckerBlock | EigenBlock | TiledBlock))
        )
    if isinstance(block, KroneckerBlock | EigenBlock) and max(block.rows, block.columns) > largest:
        return of_factors(tiled(block.Q, largest), tiled(block.G, largest))
    if isinstance(block, ScaledBlock) and block.columns > largest:
        return TiledBlock(tiled(block.M, largest), block.f.unsqueeze(1))
    return block
