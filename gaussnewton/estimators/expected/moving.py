"""Operations that only move entries: views, slices, concatenations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gaussnewton.estimators.expected.elementwise import pairs
from gaussnewton.estimators.expected.frontier import Step
from gaussnewton.estimators.expected.homogeneous import from_sums
from gaussnewton.estimators.expected.layout import Layout
from gaussnewton.estimators.expected.region import Region, shape_of

_NOWHERE = -1


class MovingStep(Step):
    """Entries change their places and nothing else. Exact, but for what layouts leave out.

    Args:
        region: the operation; each entry of an input appears in y once or not at all.
        layout: of y.
        layouts: of the inputs.
    """

    def __init__(self, region: Region, layout: Layout, layouts: Sequence[Layout]) -> None:
        self.inputs, self.layout = region.inputs, layout
        shape = shape_of(region.output)
        size = shape[1:].numel()
        marks = torch.arange(1.0, 1 + size, dtype=torch.float64).reshape(shape[1:])
        with torch.no_grad():
            found = region.pull(marks.expand(shape), cast=False)
        # Entries of y are numbered by position, then channel.
        numbers = torch.empty(size, dtype=torch.long)
        numbers[layout.numbers.reshape(-1)] = torch.arange(size)
        self.moves = [
            _Move(own, numbers, moved[0].reshape(own.shape), layout)
            for own, moved in zip(layouts, found, strict=True)
        ]

    def second(self, M: Float[Tensor, "2 c c"]) -> dict[tuple[int, int], Tensor]:
        result = {}
        for i, j in pairs(len(self.moves)):
            left, right = self.moves[i], self.moves[j]
            all = left.counts.to(M) @ M[1] @ right.counts.to(M).mT + _sum_all(M[0], left, right)
            P = (left.positions, right.positions)
            same = _sum_same(M, left, right) if P[0] == P[1] else None
            result[i, j] = from_sums(same, all, P)
        return result

    def cross(self, M: Float[Tensor, "2 c e"], positions: int) -> list[Tensor]:
        result = []
        for move in self.moves:
            N = move.counts.to(M)
            all = positions * (N @ M[1])
            has_own = positions == self.layout.positions
            all = all + N @ M[0] if has_own else all
            same = None
            if positions == move.positions:
                same = N @ M[1]
                same = same + move.stays.to(M) @ M[0] if has_own else same
            result.append(from_sums(same, all, (move.positions, positions)))
        return result


class _Move:
    """Where the entries of one input went."""

    def __init__(self, own: Layout, numbers: Tensor, marks: Tensor, layout: Layout) -> None:
        self.positions, self.width = own.positions, own.width
        found = own.gather(marks).round().long()
        there = found > 0
        at = numbers[(found - 1).clamp(min=0)]
        position, channel = at // layout.width, at % layout.width
        # Of each position and channel of the input, position and channel in y.
        self.position: Int[Tensor, "p a"] = position.where(there, _NOWHERE)
        self.channel: Int[Tensor, "p a"] = channel.where(there, _NOWHERE)
        # Of each position and channel of y, the channel of the input that came there.
        source = torch.full((layout.positions, layout.width), _NOWHERE)
        columns = torch.arange(own.width).expand_as(found)
        source[position[there], channel[there]] = columns[there]
        self.source: Int[Tensor, "p c"] = source
        self.counts = self._counted(there, layout.width)
        home = there & (position == torch.arange(own.positions).unsqueeze(1))
        self.stays = self._counted(home, layout.width)

    def _counted(self, chosen: Tensor, width: int) -> Float[Tensor, "a c"]:
        """How many times each channel of the input became each channel of y."""
        columns = torch.arange(self.width).expand_as(chosen)[chosen]
        counts = torch.zeros(self.width, width, dtype=torch.float64)
        one = torch.ones(len(columns), dtype=torch.float64)
        return counts.index_put_((columns, self.channel[chosen]), one, accumulate=True)


def _sum_all(D: Float[Tensor, "c c"], left: _Move, right: _Move) -> Float[Tensor, "a b"]:
    """Σ over pairs of entries that came from one position of y."""
    total = D.new_zeros(left.width, right.width)
    for (a, b), count in _patterns(left.source, right.source):
        i, j = (a != _NOWHERE).nonzero().squeeze(1), (b != _NOWHERE).nonzero().squeeze(1)
        at = (a[i].unsqueeze(1).to(D.device), b[j].to(D.device))
        total.index_put_(at, count * D[i][:, j], accumulate=True)
    return total


def _sum_same(M: Float[Tensor, "2 c c"], left: _Move, right: _Move) -> Float[Tensor, "a b"]:
    """Σ over pairs of entries at one position of the inputs; D where they came from one, too."""
    total = M.new_zeros(left.width, right.width)
    # Only whether positions of y are the same matters, so they are counted from one of them.
    first = left.position.amax(1, keepdim=True)
    ways = (left.channel, right.channel, left.position - first, right.position - first)
    for (a, b, p, q), count in _patterns(*ways):
        there = ((a != _NOWHERE).unsqueeze(1) & (b != _NOWHERE)).to(M)
        together = (p.unsqueeze(1) == q).to(M)
        i, j = a.clamp(min=0), b.clamp(min=0)
        total += count * there * (M[0][i][:, j] * together + M[1][i][:, j])
    return total


def _patterns(*tables: Int[Tensor, "p _"]) -> Iterator[tuple[list[Tensor], int]]:
    """The different rows of some tables side by side, and how often each is there."""
    widths = [table.shape[1] for table in tables]
    rows, counts = torch.unique(torch.cat(tables, dim=1), dim=0, return_counts=True)
    for row, count in zip(rows, counts.tolist(), strict=True):
        yield list(row.split(widths)), count
