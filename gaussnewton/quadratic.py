r"""The quadratic model of the loss with the full Gauss-Newton matrix (appendix B.2).

.. math:: \hat f(δ; \bar C) = f + δ^T ∇f + \tfrac12 δ^T \bar C δ, \quad
          \bar C = \bar G + (τ + η) I

restricted to the span of a few directions, where it is a small matrix and a small vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.jacobian import Directions, jacobian_products
from gaussnewton.observer import Observation


@dataclass(frozen=True)
class Quadratic:
    """f̂ on a span: for δ = Σ c_i d_i it is f + bᵀc + ½ cᵀ M c."""

    M: Float[Tensor, "k k"]
    b: Float[Tensor, " k"]

    def minimum(self, most: float = math.inf) -> Float[Tensor, " k"]:
        """The coefficients c that minimise the model, of those with |c_i| ≤ ``most``.

        The model is convex: if its minimum lies outside the box, the best of the box lies on
        one of its faces, where it is a model of one coefficient less.
        """
        c = self._free_minimum()
        if bool((c.abs() <= most).all()) or not bool(c.isfinite().all()):
            return c
        faces = [self._on_face(i, side, most) for i in range(len(c)) for side in (-most, most)]
        return min(faces, key=lambda c: float(self.change(c)))

    def _on_face(self, i: int, value: float, most: float) -> Float[Tensor, " k"]:
        """The best of those with c_i = value."""
        rest = [j for j in range(len(self.b)) if j != i]
        c = torch.full_like(self.b, value)
        if rest:
            slope = self.b[rest] + self.M[rest, i] * value
            c[rest] = Quadratic(self.M[rest][:, rest], slope).minimum(most)
        return c

    def _free_minimum(self) -> Float[Tensor, " k"]:
        """−M⁻¹ b.

        The rows are scaled to a unit diagonal first, so that a direction that has become
        tiny, or nearly parallel to another, does not spoil the rest.
        """
        scale = self.M.diagonal().clamp(min=torch.finfo(self.M.dtype).tiny).rsqrt()
        M = self.M * scale[:, None] * scale[None, :]
        c = torch.linalg.pinv(M, hermitian=True, rtol=1e-8) @ (self.b * scale)
        return -c * scale

    def change(self, c: Float[Tensor, " k"]) -> Float[Tensor, ""]:
        """f̂ − f at some coefficients."""
        return self.b @ c + 0.5 * c @ self.M @ c

    def project(self, basis: Float[Tensor, "k j"]) -> Quadratic:
        """The model on the span of combinations of the directions."""
        return Quadratic(basis.T @ self.M @ basis, basis.T @ self.b)


def looked_at(data: int, part: float, least: int) -> int:
    """So many data of a batch give the model's curvature: a part, but no fewer than some."""
    return min(data, max(least, round(part * data)))


def gauss_newton_gram(
    observations: Sequence[Observation],
    layers: dict[str, Tensor] | None,
    others: Directions | None,
    part: float,
    least: int,
) -> Float[Tensor, "m m"]:
    """d_iᵀ Ḡ d_j for directions that each move one layer, and directions that move all.

    Args:
        observations: the forward passes whose loss is meant.
        layers: one direction of each layer, taken as a direction by itself; first in the
            result, in the order of the forward pass.
        others: stacks of directions that move all layers.
        part: the share of each batch to look at.
        least: how many data of it to look at in any case.
    """
    total: Tensor | float = 0.0
    for observation in observations:
        record = observation.record
        taken = looked_at(record.data, part, least)
        where = slice(0, taken)
        looked_through = observation.as_a_whole if taken == record.data else observation.passage
        J = jacobian_products(looked_through, layers, others, where)
        HJ = record.geometry.hessian(*record.wide).select(where).product(J)
        gram = (J.flatten(1) @ HJ.flatten(1).T).double()
        assert observation.factor is not None
        total = total + gram * (observation.factor.double() * record.data / taken)
    assert isinstance(total, Tensor)
    return (total + total.T) / 2
