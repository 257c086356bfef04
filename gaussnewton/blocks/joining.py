"""Blocks of several passes as one, where a layer may have had no part in some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from gaussnewton.blocks.base import Block
from gaussnewton.blocks.dense import DenseBlock
from gaussnewton.blocks.diagonal import DiagonalBlock
from gaussnewton.blocks.eigen import EigenBlock
from gaussnewton.blocks.grouped import GroupedBlock
from gaussnewton.blocks.scaled import ScaledBlock
from gaussnewton.blocks.tiled import of_factors


@dataclass(frozen=True, eq=False)
class ZeroBlock(DiagonalBlock):
    """The block of parameters without a part in a pass: zero, and of no kind yet.

    Example:
        >>> import torch, gaussnewton as gn
        >>> zero = gn.ZeroBlock(torch.zeros(2, 3))
        >>> zero.kind, bool((zero @ torch.ones(2, 3)).any())
        ('zero', False)
    """

    @property
    def kind(self) -> str:
        return "zero"

    def scaled(self, factor: float) -> ZeroBlock:
        del factor
        return self

    def with_numbers(self, numbers: Mapping[str, Tensor]) -> ZeroBlock:
        return ZeroBlock(numbers["D"])

    def state_dict(self) -> dict[str, object]:
        return {"type": "zero", "D": self.D}


def merged(one: Block, other: Block, data: tuple[int, int], shares: tuple[float, float]) -> Block:
    """The block of two batches together; see :meth:`Block.merge`."""
    if isinstance(one, ZeroBlock):
        return other.scaled(shares[1])
    return one.scaled(shares[0]) if isinstance(other, ZeroBlock) else one.merge(other, data, shares)


def averaged(one: Block, newer: Block, decay: float) -> Block:
    """The running average; see :meth:`Block.average`."""
    if isinstance(one, ZeroBlock):
        return newer.scaled(1 - decay)
    return one.scaled(decay) if isinstance(newer, ZeroBlock) else one.average(newer, decay)


NUMBERS = {"D", "G", "M", "Q", "U_G", "U_Q", "f", "matrix", "values"}
"""What the tensors of blocks are called."""


def block_of(numbers: Mapping[str, Any], rows: int, columns: int) -> Block | None:
    """The block made of some tensors, by their names and sizes; None if they do not fit a matrix.

    Other entries are left alone.

    Example:
        >>> import torch
        >>> from gaussnewton.blocks.joining import block_of
        >>> block_of({"Q": torch.eye(3), "G": torch.eye(2)}, rows=2, columns=3).kind
        'Kronecker'
    """
    block: Block | None = None
    if {"Q", "G"} <= numbers.keys():
        block = _of_factors(numbers)
    elif {"f", "M"} <= numbers.keys():
        block = ScaledBlock(numbers["f"], numbers["M"])
    elif "D" in numbers:
        block = DiagonalBlock(numbers["D"])
    elif "matrix" in numbers and numbers["matrix"].shape[0] == rows * columns:
        block = DenseBlock(numbers["matrix"], rows, columns)
    return block if block is not None and (block.rows, block.columns) == (rows, columns) else None


def _of_factors(numbers: Mapping[str, Any]) -> Block:
    make = EigenBlock if "values" in numbers else of_factors
    names = [field.name for field in fields(EigenBlock)] if "values" in numbers else ["Q", "G"]
    if numbers["Q"].ndim == 2:
        return make(**{key: numbers[key] for key in names})
    count = len(numbers["Q"])
    return GroupedBlock(
        tuple(make(**{key: numbers[key][i] for key in names}) for i in range(count))
    )


def zero_block(rows: int, columns: int, like: Tensor) -> ZeroBlock:
    """Zero, in the precision that curvature has for a tensor."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return ZeroBlock(torch.zeros(rows, columns, dtype=wide, device=like.device))
