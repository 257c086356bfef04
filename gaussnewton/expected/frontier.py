"""The expected Gauss-Newton matrix over the tensors that the recursion has reached."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from gaussnewton.expected.layout import Layout
from gaussnewton.expected.region import Place


class Step(ABC):
    """What an operation y = φ(x₁ … x_k) does to expected matrices."""

    inputs: tuple[Place, ...]

    @abstractmethod
    def second(self, S: Float[Tensor, "c c"]) -> dict[tuple[int, int], Tensor]:
        """E[Jᵢᵀ S Jⱼ] for i ≤ j; pairs that are left out are zero."""

    @abstractmethod
    def cross(self, B: Float[Tensor, "c e"]) -> list[Tensor | None]:
        """E[Jᵢ]ᵀ B for each input; None where it is zero."""


class Frontier:
    r"""Blocks M[u, v] over pairs of tensors, M being symmetric and positive semi-definite.

    Replacing y by its inputs is :math:`M ← E[𝒥^T M 𝒥]`, with 𝒥 the Jacobian of y for its inputs and
    the identity for all other tensors:

    .. math:: M[x_i, x_j] \mathrel{+}= E[J_i^T M[y, y] J_j], \qquad
              M[x_i, z] \mathrel{+}= E[J_i]^T M[y, z]

    Tensors with different numbers of positions have no block in common.
    """

    def __init__(self, layouts: dict[Place, Layout]) -> None:
        self.layouts = layouts
        self._blocks: dict[Place, dict[Place, Tensor]] = {}

    def __contains__(self, place: Place) -> bool:
        return place in self._blocks

    def __getitem__(self, place: Place) -> Float[Tensor, "c c"]:
        return self._blocks[place][place]

    def add(self, u: Place, v: Place, block: Tensor) -> None:
        """Add to M[u, v], and its transpose to M[v, u]."""
        if self.layouts[u].positions != self.layouts[v].positions:
            return
        for a, b, part in ((u, v, block), (v, u, block.mT)):
            row = self._blocks.setdefault(a, {})
            row[b] = row[b] + part if b in row else part
            if u == v:
                return

    def pop(self, place: Place) -> dict[Place, Tensor]:
        """Take a tensor out, and return its row of blocks."""
        row = self._blocks.pop(place, {})
        for other in row:
            self._blocks.get(other, {}).pop(place, None)
        return row

    def replace(self, y: Place, step: Step) -> None:
        """Put the inputs of an operation in the place of its output."""
        row = self.pop(y)
        S = row.pop(y, None)
        if S is None:
            return
        for z, B in row.items():
            for x, part in zip(step.inputs, step.cross(B), strict=True):
                if part is not None:
                    # x may be there already: M[x, x] then gets both E[J]ᵀ M[y, x] and its transpose.
                    self.add(x, z, part + part.mT if x == z else part)
        for (i, j), part in step.second(S).items():
            self.add(step.inputs[i], step.inputs[j], part)
