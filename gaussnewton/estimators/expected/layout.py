"""Which axes of a tensor are channels, and which count positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How the matrix of a tensor is kept: C × C, summed over P positions.

    Positions are taken to have the same expected matrix, and no correlation between them. Where
    every axis counts as channels there is one position and nothing is assumed.

    Args:
        shape: of one datum.
        channels: the axes of it, ascending, that count as channels.

    Example:
        >>> from gaussnewton.estimators.expected import Layout
        >>> layout = Layout((3, 8, 8), (0,))        # a feature map of three channels
        >>> layout.width, layout.positions
        (3, 64)
    """

    shape: tuple[int, ...]
    channels: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Layout:
        """All axes are channels."""
        return cls(tuple(shape), tuple(range(len(shape))))

    @property
    def width(self) -> int:
        """C, the number of channels."""
        return prod(self.shape[axis] for axis in self.channels)

    @property
    def positions(self) -> int:
        """P."""
        return prod(self.spatial)

    @property
    def spatial(self) -> tuple[int, ...]:
        """The sizes of the axes that count positions."""
        return tuple(self.shape[axis] for axis in self._others)

    @property
    def _others(self) -> tuple[int, ...]:
        return tuple(axis for axis in range(len(self.shape)) if axis not in self.channels)

    def gather(self, tensor: Tensor) -> Shaped[Tensor, "*k p c"]:
        """From ``[…, *shape]`` to ``[…, P, C]``."""
        lead = tensor.ndim - len(self.shape)
        order = [*range(lead), *(lead + axis for axis in (*self._others, *self.channels))]
        return tensor.permute(order).reshape(*tensor.shape[:lead], self.positions, self.width)

    def scatter(self, tensor: Shaped[Tensor, "*k p c"]) -> Tensor:
        """From ``[…, P, C]`` to ``[…, *shape]``; the inverse of :meth:`gather`."""
        lead, axes = tensor.ndim - 2, (*self._others, *self.channels)
        apart = tensor.reshape(*tensor.shape[:-2], *(self.shape[axis] for axis in axes))
        back = [axes.index(axis) for axis in range(len(axes))]
        return apart.permute([*range(lead), *(lead + axis for axis in back)])

    @cached_property
    def numbers(self) -> Int[Tensor, "p c"]:
        """The place of each channel at each position in the flattened datum."""
        return self.gather(torch.arange(prod(self.shape)).reshape(self.shape))

    def summed(self, matrix: Float[Tensor, "d d"]) -> Float[Tensor, "c c"]:
        """Of a matrix over the flattened datum, the sum of the blocks of each position."""
        if self.positions == 1:
            order = self.numbers[0].to(matrix.device)
            return matrix[order][:, order]
        total = matrix.new_zeros(self.width, self.width)
        for places in self.numbers.to(matrix.device):
            total += matrix[places][:, places]
        return total

    def summed_pairs(self, matrix: Float[Tensor, "d d"]) -> Float[Tensor, "c c"]:
        """The sum of the blocks between all pairs of positions."""
        order = self.numbers.reshape(-1).to(matrix.device)
        tiles = (self.positions, self.width)
        return matrix[order][:, order].reshape(*tiles, *tiles).sum((0, 2))


def through_view(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The channels of a tensor after a change of shape; None where they got mixed with positions.

    Example:
        >>> from gaussnewton.estimators.expected.layout import Layout, through_view
        >>> through_view(Layout((6, 8), (1,)), (6, 2, 4))       # heads, of a sequence
        (1, 2)
        >>> through_view(Layout((3, 4, 4), (0,)), (48,)) is None
        True
    """
    found: list[int] = []
    for old, new in _common_stretches(layout.shape, shape):
        kinds = {axis in layout.channels for axis in old if layout.shape[axis] != 1}
        if len(kinds) > 1:
            return None
        # An axis of one entry is of either kind.
        if kinds == {True} or (not kinds and any(axis in layout.channels for axis in old)):
            found.extend(new)
    return tuple(found)


def _common_stretches(
    old: tuple[int, ...], new: tuple[int, ...]
) -> list[tuple[list[int], list[int]]]:
    """The shortest stretches of axes that hold the same number of entries in both shapes."""
    ends_old, ends_new = _ends(old), _ends(new)
    cuts = sorted(set(ends_old) & set(ends_new))
    result = []
    for start, stop in pairwise([1, *cuts] if 1 not in cuts else cuts):
        result.append(
            (
                [axis for axis, end in enumerate(ends_old) if start < end <= stop],
                [axis for axis, end in enumerate(ends_new) if start < end <= stop],
            )
        )
    return result


def _ends(shape: tuple[int, ...]) -> list[int]:
    """The number of entries up to and with each axis; those of size one add nothing."""
    ends, count = [], 1
    for size in shape:
        count *= size
        ends.append(count)
    return ends
