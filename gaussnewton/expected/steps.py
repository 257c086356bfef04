"""Steps that are not a layer's own: entry by entry, by moving entries, or any other function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations_with_replacement

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gaussnewton.expected.frontier import Step
from gaussnewton.expected.layout import Layout
from gaussnewton.expected.region import Place, Region, like, shape_of
from gaussnewton.gram import widened
from gaussnewton.perdatum.dense import psd_root

# How many numbers go back through a region at a time.
_AT_ONCE = 2**24


class ElementwiseStep(Step):
    """Entry by entry in each input: Jᵢ = diag(sᵢ), so S ⊙ E[sᵢ sⱼᵀ] and diag(E[sᵢ]) B.

    The expectation is over data and positions. An activation, a sum, a product of two tensors, a
    mask and a scale are of this kind.

    Args:
        inputs: x₁ … x_k.
        slopes: sᵢ at each datum and position.
    """

    def __init__(self, inputs: Sequence[Place], slopes: Sequence[Float[Tensor, "n p c"]]) -> None:
        self.inputs = tuple(inputs)
        self.slopes = [widened(s).flatten(0, 1) for s in slopes]

    def second(self, S: Float[Tensor, "c c"]) -> dict[tuple[int, int], Tensor]:
        count = len(self.slopes[0])
        return {
            (i, j): S * (self.slopes[i].mT @ self.slopes[j] / count)
            for i, j in _pairs(len(self.inputs))
        }

    def cross(self, B: Float[Tensor, "c e"]) -> list[Tensor | None]:
        return [s.mean(0).unsqueeze(1) * B for s in self.slopes]


class MovingStep(Step):
    """Entries change their places and nothing else: a view, a slice, a concatenation.

    Exact but for what layouts leave out. No root of S is needed.

    Args:
        region: the operation; each entry of an input appears in y once or not at all.
        layout: of y.
        layouts: of the inputs.
    """

    def __init__(self, region: Region, layout: Layout, layouts: Sequence[Layout]) -> None:
        self.inputs, self.layout, self.layouts = region.inputs, layout, layouts
        shape = shape_of(region.output)
        marks = torch.arange(1.0, 1 + shape[1:].numel(), dtype=torch.float64)
        with torch.no_grad():
            found = region.pull(marks.reshape(shape[1:]).expand(shape), cast=False)
        # For each position and channel of an input, where it went: position, channel, or nowhere.
        places = torch.empty(shape[1:].numel(), dtype=torch.long)
        places[layout.numbers.reshape(-1)] = torch.arange(layout.numbers.numel())
        self.went: list[tuple[Int[Tensor, "p c"], Int[Tensor, "p c"], Bool[Tensor, "p c"]]] = []
        for own, moved in zip(layouts, found, strict=True):
            number = own.gather(moved[0].reshape(own.shape)).round().long()
            at = places[(number - 1).clamp(min=0)]
            width = max(layout.width, 1)
            self.went.append((at // width, at % width, number > 0))

    def second(self, S: Float[Tensor, "c c"]) -> dict[tuple[int, int], Tensor]:
        result = {}
        for i, j in _pairs(len(self.inputs)):
            if self.layouts[i].positions == self.layouts[j].positions:
                result[i, j] = self._moment(S, i, j)
        return result

    def cross(self, B: Float[Tensor, "c e"]) -> list[Tensor | None]:
        result: list[Tensor | None] = []
        for own, (p, c, valid) in zip(self.layouts, self.went, strict=True):
            if own.positions != self.layout.positions:
                result.append(None)
                continue
            stays = valid & (p == torch.arange(own.positions).unsqueeze(1))
            patterns, counts = torch.unique(
                torch.where(stays, c, -1), dim=0, return_counts=True
            )
            total: Tensor | float = 0.0
            for pattern, count in zip(patterns, counts.tolist(), strict=True):
                kept = (pattern >= 0).to(B).unsqueeze(1)
                total = total + B[pattern.clamp(min=0)] * kept * (count / own.positions)
            assert isinstance(total, Tensor)
            result.append(total)
        return result

    def _moment(self, S: Float[Tensor, "c c"], i: int, j: int) -> Float[Tensor, "a b"]:
        """Σ over positions of the input of S[channels, channels] / P, zero across positions of y."""
        (pi, ci, vi), (pj, cj, vj) = self.went[i], self.went[j]
        first = torch.where(vi, pi, self.layout.positions).amin(1, keepdim=True)
        marks = [torch.where(v, p - first, -(10**9)) for p, v in ((pi, vi), (pj, vj))]
        patterns, counts = torch.unique(
            torch.cat([ci * vi, cj * vj, *marks], dim=1), dim=0, return_counts=True
        )
        a, b = ci.shape[1], cj.shape[1]
        total = S.new_zeros(a, b)
        for pattern, count in zip(patterns, counts.tolist(), strict=True):
            left, right, at_left, at_right = pattern.split([a, b, a, b])
            there = at_left > -(10**9)
            same = (at_left.unsqueeze(1) == at_right) & there.unsqueeze(1)
            total += S[left][:, right] * same.to(S) * (count / self.layout.positions)
        return total


class GeneralStep(Step):
    """Any function that treats each datum by itself: the rows of a root of S go back through it.

    Positions of y have no correlation, so rows of different positions must not meet. They go back
    together where they cannot (``combs``), else one position after the other.

    Args:
        region: the function.
        layout: of y.
        layouts: of the inputs.
        combs: sets of positions of y that go back together.
        constant: whether the Jacobian is the same for all data; the rows then take their places.
    """

    def __init__(
        self,
        region: Region,
        layout: Layout,
        layouts: Sequence[Layout],
        combs: Sequence[Int[Tensor, " k"]],
        constant: bool = False,
    ) -> None:
        self.inputs, self.region = region.inputs, region
        self.layout, self.layouts = layout, layouts
        self.combs, self.constant = combs, constant
        # Where only some of the positions are asked, each speaks for several.
        self.share = 1 / sum(len(comb) for comb in combs)

    def second(self, S: Float[Tensor, "c c"]) -> dict[tuple[int, int], Tensor]:
        R = _root(S)
        result: dict[tuple[int, int], Tensor] = {}
        for comb in self.combs:
            for _, found in self._back(R, comb):
                for i, j in _pairs(len(self.inputs)):
                    if self.layouts[i].positions == self.layouts[j].positions:
                        left, right = (found[k].flatten(0, 2) for k in (i, j))
                        part = left.mT @ right * (self.share / found[i].shape[1])
                        result[i, j] = result[i, j] + part if (i, j) in result else part
        return result

    def cross(self, B: Float[Tensor, "c e"]) -> list[Tensor | None]:
        return [None if E is None else E.to(B).mT @ B for E in self._expected]

    @cached_property
    def _expected(self) -> list[Float[Tensor, "c a"] | None]:
        """E[Jᵢ] from a position to the same position."""
        keeps = [own.positions == self.layout.positions for own in self.layouts]
        size = self.layout.width
        eye = torch.eye(size).to(widened(like(self.region.output)))
        result = [eye.new_zeros(size, own.width) if k else None
                  for own, k in zip(self.layouts, keeps, strict=True)]
        for comb in self.combs:
            for rows, found in self._back(eye, comb):
                for E, g in zip(result, found, strict=True):
                    if E is not None:
                        E[rows] += g[:, :, comb].mean(1).sum(1) * self.share
        return result

    def _back(
        self, rows: Float[Tensor, "r c"], comb: Int[Tensor, " k"]
    ) -> Iterator[tuple[slice, list[Float[Tensor, "r n p c"]]]]:
        """Rows at some positions of y, seen at the inputs; some rows at a time."""
        n = shape_of(self.region.output)[0]
        most = max(shape_of(p).numel() for p in (self.region.output, *self.inputs)) // n
        step = max(1, _AT_ONCE // (most * (1 if self.constant else n)))
        for begin in range(0, len(rows), step):
            part = rows[begin : begin + step].to(like(self.region.output))
            placed = part.new_zeros(len(part), self.layout.positions, self.layout.width)
            placed[:, comb] = part.unsqueeze(1)
            at_y = self.layout.scatter(placed)
            found = self._constant(at_y, n) if self.constant else self._each(at_y, n)
            yield slice(begin, begin + len(part)), found

    def _each(self, at_y: Float[Tensor, "r *y"], n: int) -> list[Tensor]:
        found = self.region.pull_rows(at_y.unsqueeze(1).expand(-1, n, *self.layout.shape))
        return [
            widened(own.gather(g.reshape(len(at_y), n, *own.shape)))
            for own, g in zip(self.layouts, found, strict=True)
        ]

    def _constant(self, at_y: Float[Tensor, "r *y"], n: int) -> list[Tensor]:
        lacking = -len(at_y) % n
        padded = torch.cat([at_y, at_y.new_zeros(lacking, *self.layout.shape)])
        found = self.region.pull_rows(padded.reshape(-1, n, *self.layout.shape))
        return [
            widened(own.gather(g.reshape(-1, *own.shape)[: len(at_y)])).unsqueeze(1)
            for own, g in zip(self.layouts, found, strict=True)
        ]


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    return combinations_with_replacement(range(count), 2)


def _root(S: Float[Tensor, "c c"]) -> Float[Tensor, "r c"]:
    """R with RᵀR = S, without the rows that are zero but for rounding."""
    R = psd_root(S.unsqueeze(0))[0]
    sizes = R.square().sum(1)
    kept = sizes > sizes.sum() * torch.finfo(S.dtype).eps
    return R[kept] if bool(kept.any()) else R[:1]
