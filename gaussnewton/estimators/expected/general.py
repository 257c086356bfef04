"""Any operation that treats each datum by itself: rows go back through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gaussnewton.estimators.expected.elementwise import pairs
from gaussnewton.estimators.expected.frontier import Step
from gaussnewton.estimators.expected.homogeneous import from_sums
from gaussnewton.estimators.expected.layout import Layout
from gaussnewton.estimators.expected.region import Place, Region, like, shape_of
from gaussnewton.precision import widened

# How many numbers go back through a region at a time.
_AT_ONCE = 2**24

Sums = dict[tuple[int, int], tuple[Tensor, Tensor]]
"""For pairs of inputs, Σ_p M[x_p, x'_p] and Σ_pq M[x_p, x'_q]."""


class GeneralStep(Step):
    """The rows of a root of M go back through the graph's own nodes, for every datum.

    A row of B goes back from all positions at once. A row of D goes back from one position; those
    that cannot meet on their way go together (``combs``).

    Args:
        region: the function.
        layout: of y.
        layouts: of the inputs.
        combs: sets of positions of y that go back together.
        keeps_sums: whether the rows that reach an input sum up, over positions, to what was sent.
            Needed for combs of several positions that change places, as in pooling.
        constant: whether the Jacobian is the same for all data; rows then take the places of data.
    """

    def __init__(
        self,
        region: Region,
        layout: Layout,
        layouts: Sequence[Layout],
        combs: Sequence[Int[Tensor, " k"]],
        keeps_sums: bool = False,
        constant: bool = False,
    ) -> None:
        self.inputs: tuple[Place, ...] = region.inputs
        self.region, self.layout, self.layouts = region, layout, layouts
        self.combs, self.keeps_sums, self.constant = combs, keeps_sums, constant

    def second(self, M: Float[Tensor, "2 c c"]) -> dict[tuple[int, int], Tensor]:
        sums = self.own_sums(M[0])
        if self.layout.positions > 1:
            everywhere = torch.arange(self.layout.positions)
            for key, (same, all) in self._moments(M[1], everywhere).items():
                sums[key] = (sums[key][0] + same, sums[key][1] + all)
        return {(i, j): from_sums(*sums[i, j], self._counts(i, j)) for i, j in sums}

    def own_sums(self, D: Float[Tensor, "c c"]) -> Sums:
        """What comes of the part D that each position of y has of its own."""
        share = self.layout.positions / sum(len(comb) for comb in self.combs)
        sums: Sums = {}
        for comb in self.combs:
            for key, (same, all) in self._moments(D, comb).items():
                if len(comb) > 1:  # what went together was not to be summed
                    all = D * len(comb) if self.keeps_sums else same
                old = sums.get(key, (0.0, 0.0))
                sums[key] = (old[0] + share * same, old[1] + share * all)
        return sums

    def cross(self, M: Float[Tensor, "2 c e"], positions: int) -> list[Tensor]:
        result = []
        has_own = positions == self.layout.positions
        for i, E in enumerate(self._whole_jacobians):
            E = E.to(M).mT
            all = positions * (E @ M[1]) + (E @ M[0] if has_own else 0)
            P, same = self.layouts[i].positions, None
            if positions == P:
                same = E @ M[1] + (self.home_jacobians[i].to(M).mT @ M[0] if has_own else 0)
            result.append(from_sums(same, all, (P, positions)))
        return result

    @cached_property
    def home_jacobians(self) -> list[Float[Tensor, "c a"]]:
        """Σ_p E[∂y_p/∂x_p] of each input with the same positions."""
        share = self.layout.positions / sum(len(comb) for comb in self.combs)
        result = self._zeros()
        for comb in self.combs:
            for rows, found in self._back(self._eye(), comb):
                for E, g in zip(result, found, strict=True):
                    if g.shape[2] == self.layout.positions:
                        E[rows] += share * g[:, :, comb].mean(1).sum(1)
        return result

    @cached_property
    def _whole_jacobians(self) -> list[Float[Tensor, "c a"]]:
        """Σ_pq E[∂y_p/∂x_q] of each input."""
        result = self._zeros()
        for rows, found in self._back(self._eye(), torch.arange(self.layout.positions)):
            for E, g in zip(result, found, strict=True):
                E[rows] += g.mean(1).sum(1)
        return result

    def _eye(self) -> Float[Tensor, "c c"]:
        return torch.eye(self.layout.width).to(widened(like(self.region.output)))

    def _zeros(self) -> list[Float[Tensor, "c a"]]:
        return [self._eye().new_zeros(self.layout.width, own.width) for own in self.layouts]

    def _counts(self, i: int, j: int) -> tuple[int, int]:
        return self.layouts[i].positions, self.layouts[j].positions

    def _moments(self, S: Float[Tensor, "c c"], comb: Int[Tensor, " k"]) -> Sums:
        """Of rows at some positions: the sums of their products at the inputs."""
        sums: Sums = {}
        for i, j in pairs(len(self.inputs)):
            zero = S.new_zeros(self.layouts[i].width, self.layouts[j].width)
            sums[i, j] = (zero, zero.clone())
        for _, found in self._back(_root(S), comb):
            for (i, j), (same, all) in sums.items():
                left, right = found[i], found[j]
                n = left.shape[1]
                all += left.sum(2).flatten(0, 1).mT @ right.sum(2).flatten(0, 1) / n
                if left.shape[2] == right.shape[2]:
                    same += left.flatten(0, 2).mT @ right.flatten(0, 2) / n
        return sums

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

    def _each(self, at_y: Tensor, n: int) -> list[Tensor]:
        found = self.region.pull_rows(at_y.unsqueeze(1).expand(-1, n, *self.layout.shape))
        return [
            widened(own.gather(g.reshape(len(at_y), n, *own.shape)))
            for own, g in zip(self.layouts, found, strict=True)
        ]

    def _constant(self, at_y: Tensor, n: int) -> list[Tensor]:
        lacking = -len(at_y) % n
        padded = torch.cat([at_y, at_y.new_zeros(lacking, *self.layout.shape)])
        found = self.region.pull_rows(padded.reshape(-1, n, *self.layout.shape))
        return [
            widened(own.gather(g.reshape(-1, *own.shape)[: len(at_y)])).unsqueeze(1)
            for own, g in zip(self.layouts, found, strict=True)
        ]


def _root(S: Float[Tensor, "c c"]) -> Float[Tensor, "r c"]:
    """R with RᵀR = S, or the PSD part of S, without the rows that are zero but for rounding.

    D and B are differences, and need not be PSD where positions are anti-correlated.
    """
    values, vectors = torch.linalg.eigh((S + S.mT) / 2)
    kept = values > values.abs().sum() * torch.finfo(S.dtype).eps
    return (vectors[:, kept] * values[kept].sqrt()).mT
