"""Operations that act entry by entry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.estimators.expected.frontier import Step
from gaussnewton.estimators.expected.homogeneous import from_sums
from gaussnewton.estimators.expected.region import Place, Region
from gaussnewton.precision import widened


class ElementwiseStep(Step):
    r"""Entry by entry in each input: J = diag(s), so :math:`E[s_p s_q^T] ⊙ M[y_p, y_q]`.

    An activation, a sum, a product of two tensors, a mask and a scale are of this kind. The moments
    of s are averaged over positions too, apart for p = q and p ≠ q.

    Args:
        inputs: x₁ … x_k.
        slopes: s of each input, at each datum and position.
        region: what lies between, where it was found in the graph.
    """

    def __init__(
        self,
        inputs: Sequence[Place],
        slopes: Sequence[Float[Tensor, "n p c"]],
        region: Region | None = None,
    ) -> None:
        self.inputs, self.region = tuple(inputs), region
        self.slopes = [widened(s) for s in slopes]

    def second(self, M: Float[Tensor, "2 c c"]) -> dict[tuple[int, int], Tensor]:
        return {(i, j): self._second(M, i, j) for i, j in pairs(len(self.inputs))}

    def _second(self, M: Float[Tensor, "2 c c"], i: int, j: int) -> Float[Tensor, "2 c c"]:
        left, right = self.slopes[i].to(M), self.slopes[j].to(M)
        n, P, _ = left.shape
        same = left.flatten(0, 1).mT @ right.flatten(0, 1) / n
        if P == 1:
            return M * same
        own, common = from_sums(same, left.sum(1).mT @ right.sum(1) / n, (P, P))
        # s_p s_qᵀ is itself δ_pq own + common, and so the product of the two is.
        D, B = M
        return torch.stack([D * (own + common) + B * own, B * common])

    def cross(self, M: Float[Tensor, "2 c e"], positions: int) -> list[Tensor]:
        del positions
        return [s.to(M).mean((0, 1)).unsqueeze(1) * M for s in self.slopes]


def pairs(count: int) -> Iterator[tuple[int, int]]:
    """All (i, j) with i ≤ j."""
    return combinations_with_replacement(range(count), 2)
