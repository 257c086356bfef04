"""Full form: each matrix written out."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.perdatum.base import PerDatum
from gaussnewton.perdatum.roots import Roots
from gaussnewton.precision import widened


class Dense(PerDatum):
    """M_n itself, d × d for each datum; worth it where the rank is about the width."""

    def __init__(self, matrices: Float[Tensor, "n d d"]) -> None:
        self.matrices = matrices
        self.data, self.width, _ = matrices.shape

    @property
    def rank(self) -> int:
        return self.width

    def total(self) -> Float[Tensor, "d d"]:
        return self.matrices.sum(0)

    def product(self, v: Float[Tensor, "*k n d"]) -> Float[Tensor, "*k n d"]:
        return (self.matrices @ v.unsqueeze(-1)).squeeze(-1)

    def scale(self, slope: Float[Tensor, "n d"]) -> Dense:
        return Dense(self.matrices.mul_(slope.unsqueeze(2)).mul_(slope.unsqueeze(1)))

    def pull(self, W: Float[Tensor, "d e"]) -> PerDatum:
        if W.shape[1] > self.width:  # a bottleneck: the rank stays d while the width grows
            return self.roots().pull(W)
        half = (self.matrices.flatten(0, 1) @ W).unflatten(0, self.matrices.shape[:2])
        return Dense(W.T @ half)

    def roots(self) -> Roots:
        return Roots(psd_root(self.matrices))

    def widened(self) -> Dense:
        return Dense(widened(self.matrices))

    def select(self, part: slice) -> Dense:
        return Dense(self.matrices[part].clone())

    def dense(self) -> Float[Tensor, "n d d"]:
        return self.matrices

    def diagonal_in(self, U: Float[Tensor, "d e"]) -> Float[Tensor, "n e"]:
        half = (self.matrices.flatten(0, 1) @ U).unflatten(0, self.matrices.shape[:2])
        return half.mul_(U).sum(1).clamp_(min=0)


def psd_root(matrices: Float[Tensor, "n d d"]) -> Float[Tensor, "n d d"]:
    """R with RᵀR = M: by Cholesky where M is definite, by eigenvectors where it is not.

    Both are backward stable. Cholesky is many times faster, and says where it failed.
    """
    factor, failed = torch.linalg.cholesky_ex(matrices)
    R = factor.mT.contiguous()
    if failed.any():
        bad = failed.nonzero().squeeze(1)
        values, vectors = torch.linalg.eigh(matrices[bad])
        R[bad] = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)).mT
    return R


def psd_part(matrices: Float[Tensor, "n d d"]) -> Float[Tensor, "n d d"]:
    """The nearest positive semi-definite matrices: negative eigenvalues become zero."""
    values, vectors = torch.linalg.eigh(matrices)
    if bool((values >= 0).all()):
        return matrices
    return (vectors * values.clamp(min=0).unsqueeze(-2)) @ vectors.mT
