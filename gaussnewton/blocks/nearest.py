"""The Kronecker product nearest to a sum of some."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks.base import Block
from gaussnewton.blocks.kronecker import KroneckerBlock
from gaussnewton.blocks.scaled import ScaledBlock
from gaussnewton.blocks.tiled import TiledBlock, of_factors
from gaussnewton.tiles import tiled_diagonal


def nearest_kronecker(blocks: Sequence[Block]) -> KroneckerBlock | TiledBlock:
    r"""The C ⊗ R that is nearest to Σ_u C_u ⊗ R_u in the Frobenius norm.

    Rearranged, the sum is the matrix :math:`\sum_u vec(C_u) vec(R_u)^T`, and the nearest Kronecker
    product its leading singular pair (Van Loan and Pitsianis 1993). That lies in the span of the
    terms, so only their inner products :math:`A_{uv} = ⟨C_u, C_v⟩`, :math:`B_{uv} = ⟨R_u, R_v⟩` are
    needed: C = Σ α_u C_u with α the leading eigenvector of B A, and R = Σ_u R_u (A α)_u / αᵀAα. For
    PSD terms these are not negative, hence nor is α, and the result is PSD. Where terms are in
    tiles, so is the result, the other terms being cut alike.

    Example:
        >>> import torch, gaussnewton as gn
        >>> from gaussnewton.blocks.nearest import nearest_kronecker
        >>> one = gn.KroneckerBlock(Q=2 * torch.eye(2), G=torch.eye(3))
        >>> torch.allclose(nearest_kronecker([one, one]).dense(), 4 * torch.eye(6))
        True
    """
    pairs = [_factors(block) for block in blocks]
    Cs, Rs = (_alike([pair[i] for pair in pairs]) for i in (0, 1))
    A, B = _inner_products(Cs), _inner_products(Rs)
    alpha = _leading(B @ A)
    weights = A @ alpha / (alpha @ A @ alpha).clamp(min=torch.finfo(A.dtype).tiny)
    return of_factors(_combined(alpha, Cs), _combined(weights, Rs))


def _factors(block: Block) -> tuple[Float[Tensor, "c q"], Float[Tensor, "r g"]]:
    if isinstance(block, ScaledBlock):
        return block.M, block.f.unsqueeze(1)  # a diagonal is a matrix in tiles of 1
    assert isinstance(block, KroneckerBlock | TiledBlock)
    return block.Q, block.G


def _alike(factors: list[Tensor]) -> list[Tensor]:
    """In tiles of one size: that of the factor which is not merely a diagonal, if one is not."""
    size = min([factor.shape[1] for factor in factors if factor.shape[1] > 1] or [1])
    return [
        tiled_diagonal(factor[:, 0], size) if factor.shape[1] == 1 else factor for factor in factors
    ]


def _inner_products(matrices: Sequence[Tensor]) -> Float[Tensor, "m m"]:
    flat = torch.stack([matrix.reshape(-1) for matrix in matrices])
    return (flat @ flat.T).double()


def _leading(M: Float[Tensor, "m m"]) -> Float[Tensor, " m"]:
    """The leading eigenvector of a matrix without negative entries, which has none either."""
    values, vectors = torch.linalg.eig(M)
    return vectors[:, values.real.argmax()].real.abs()


def _combined(weights: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    terms = [w.to(m.dtype) * m for w, m in zip(weights, matrices, strict=True)]
    return torch.stack(terms).sum(0)
