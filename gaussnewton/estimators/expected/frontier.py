"""The expected Gauss-Newton matrix over the tensors that the recursion has reached."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from gaussnewton.estimators.expected.layout import Layout
from gaussnewton.estimators.expected.region import Place


class Step(ABC):
    """What an operation y = φ(x₁ … x_k) does to expected matrices.

    Matrices are stacks of the two parts of :mod:`~gaussnewton.estimators.expected.homogeneous`.
    """

    inputs: tuple[Place, ...]

    @abstractmethod
    def second(self, M: Float[Tensor, "2 c c"]) -> dict[tuple[int, int], Tensor]:
        """E[Jᵢᵀ M Jⱼ] for i ≤ j."""

    @abstractmethod
    def cross(self, M: Float[Tensor, "2 c e"], positions: int) -> list[Tensor]:
        """E[Jᵢ]ᵀ M for each input, M being with another tensor of so many positions."""


class Frontier:
    r"""Blocks M[u, v] over pairs of tensors, M being symmetric and positive semi-definite.

    Replacing y by its inputs is :math:`M ← E[𝒥^T M 𝒥]`, with 𝒥 the Jacobian of y for its inputs and
    the identity for all other tensors:

    .. math:: M[x_i, x_j] \mathrel{+}= E[J_i^T M[y, y] J_j], \qquad
              M[x_i, z] \mathrel{+}= E[J_i]^T M[y, z]
    """

    def __init__(self, layouts: dict[Place, Layout]) -> None:
        self.layouts = layouts
        self._blocks: dict[Place, dict[Place, Tensor]] = {}

    def __contains__(self, place: Place) -> bool:
        return place in self._blocks

    def __getitem__(self, place: Place) -> Float[Tensor, "2 c c"]:
        return self._blocks[place][place]

    def add(self, u: Place, v: Place, block: Float[Tensor, "2 a b"]) -> None:
        """Add to M[u, v], and its transpose to M[v, u]."""
        pairs = [(u, v, block)] if u == v else [(u, v, block), (v, u, block.mT)]
        for a, b, part in pairs:
            row = self._blocks.setdefault(a, {})
            row[b] = row[b] + part if b in row else part

    def pop(self, place: Place) -> dict[Place, Tensor]:
        """Take a tensor out, and return its row of blocks."""
        row = self._blocks.pop(place, {})
        for other in row:
            self._blocks.get(other, {}).pop(place, None)
        return row

    def replace(self, y: Place, step: Step) -> None:
        """Put the inputs of an operation in the place of its output."""
        row = self.pop(y)
        M = row.pop(y)
        for z, block in row.items():
            moved = step.cross(block, self.layouts[z].positions)
            for x, part in zip(step.inputs, moved, strict=True):
                # x may be there already: M[x, x] then gets both E[J]ᵀ M[y, x] and its transpose.
                self.add(x, z, part + part.mT if x == z else part)
        for (i, j), part in step.second(M).items():
            self.add(step.inputs[i], step.inputs[j], part)
