"""The Hessian of cross-entropy."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.gram import gram
from gaussnewton.perdatum.base import PerDatum
from gaussnewton.perdatum.roots import Roots
from gaussnewton.precision import widened
from gaussnewton.tiles import tiled_diagonal, tiled_gram


class Softmax(PerDatum):
    """w (diag(p) − p pᵀ) at each position of each datum.

    Outputs are laid out ``[class, position]``, as ``nn.CrossEntropyLoss`` has them;
    positions do not interact.

    Args:
        p: class probabilities.
        w: the weight with which each position enters the loss.
    """

    def __init__(self, p: Float[Tensor, "n c s"], w: Float[Tensor, "n s"]) -> None:
        self.p, self.w = p, w
        self.data, self.classes, self.positions = p.shape
        self.width = self.classes * self.positions

    @property
    def rank(self) -> int:
        return max(self.classes - 1, 1) * self.positions

    def total(self) -> Float[Tensor, "d d"]:
        result = self.p.new_zeros(self.classes, self.positions, self.classes, self.positions)
        for s in range(self.positions):
            p, w = self.p[:, :, s], self.w[:, s, None]
            result[:, s, :, s] = (w * p).sum(0).diag() - gram(w.sqrt() * p)
        return result.reshape(self.width, self.width)

    def tiled_total(self, largest: int | None) -> Float[Tensor, "d b"]:
        if self.positions > 1:
            return super().tiled_total(largest)
        p = self.p[:, :, 0]
        return tiled_diagonal((self.w * p).sum(0), largest) - tiled_gram(self.w.sqrt() * p, largest)

    def product(self, v: Float[Tensor, "*k n d"]) -> Float[Tensor, "*k n d"]:
        v = v.unflatten(-1, (self.classes, self.positions))
        inner = (self.p * v).sum(-2, keepdim=True)
        return (self.w.unsqueeze(-2) * self.p * (v - inner)).flatten(-2)

    def scale(self, slope: Float[Tensor, "n d"]) -> Roots:
        return self.roots().scale(slope)

    def pull(self, W: Float[Tensor, "d e"]) -> Roots:
        return self.roots().pull(W)

    def roots(self) -> Roots:
        """Rank c − 1 at each position, without an eigendecomposition.

        With q = √p, diag(p) − p pᵀ = diag(q) (I − q qᵀ) diag(q), and I − q qᵀ = U Uᵀ for
        any orthonormal basis U of what is orthogonal to q. The Householder reflection
        that takes the last axis to −q has such a basis in its other columns:
        U_ij = δ_ij − v_i q_j / (1 + q_c) with v = q + e_c; q >= 0 keeps it stable.
        """
        q = self.p.sqrt().transpose(1, 2)  # n s c
        v = q.clone()
        v[..., -1] += 1
        side = q[..., :-1] / (1 + q[..., -1:])
        rows = -side.unsqueeze(-1) * (v * q).unsqueeze(-2)  # n s (c-1) c
        rows.diagonal(dim1=-2, dim2=-1).add_(q[..., :-1])
        rows *= self.w.sqrt()[..., None, None]
        if self.positions == 1:
            return Roots(rows.squeeze(1))
        spread = torch.diag_embed(rows.movedim(1, -1))  # n (c-1) c s s
        return Roots(spread.movedim(2, 3).reshape(self.data, -1, self.width))

    def widened(self) -> Softmax:
        return Softmax(widened(self.p), widened(self.w))

    def select(self, part: slice) -> Softmax:
        return Softmax(self.p[part], self.w[part])

    def diagonal_in(self, U: Float[Tensor, "d e"]) -> Float[Tensor, "n e"]:
        """w (Σ_c p_c u_c² − (Σ_c p_c u_c)²), a variance under p, summed over positions."""
        u = U.unflatten(0, (self.classes, self.positions))
        result = self.p.new_zeros(self.data, U.shape[1])
        for s in range(self.positions):
            p = self.p[:, :, s]
            variance = p @ u[:, s].square() - (p @ u[:, s]).square()
            result += self.w[:, s, None] * variance.clamp(min=0)
        return result
