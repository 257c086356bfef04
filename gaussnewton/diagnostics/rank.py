"""The rank of the Monte-Carlo Gauss-Newton matrix (appendix D)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gaussnewton import exact
from gaussnewton.exact.batch import evaluate
from gaussnewton.model_state import unchanged


@dataclass(frozen=True)
class RankFacts:
    """The numerical rank of Ḡ, and what bounds it.

    Attributes:
        rank: eigenvalues above the tolerance.
        bound: the sum over data of rank(𝓗_L), which is at most N · rank(𝓗_L).
        parameters: the size of Ḡ.
        data: N.
    """

    rank: int
    bound: int
    parameters: int
    data: int


def gauss_newton_rank(
    model: nn.Module, criterion: Any, batch: Any, *, tolerance: float | None = None
) -> RankFacts:
    """rank(Ḡ) ≤ Σ_n rank(𝓗_L), so with few outputs most directions have no curvature.

    Args:
        model: a small model: Ḡ is formed.
        criterion: the loss.
        batch: ``(inputs, targets)``.
        tolerance: eigenvalues below ``tolerance`` times the largest count as zero; by
            default the size of the matrix times the machine's precision.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(),
        ...                             torch.nn.Linear(5, 1)).double()
        >>> x, y = torch.randn(7, 6).double(), torch.randn(7, 1).double()
        >>> gn.diagnostics.gauss_newton_rank(model, torch.nn.MSELoss(), (x, y))
        RankFacts(rank=7, bound=7, parameters=41, data=7)
    """
    G = exact.gauss_newton(model, criterion, batch)
    with unchanged(model):
        seen = evaluate(model, criterion, batch)
        middle = exact.output_hessian(criterion, seen.outputs.detach(), seen.targets)
    return RankFacts(
        rank=int(_ranks(G.unsqueeze(0), tolerance)),
        bound=int(_ranks(middle, tolerance)),
        parameters=G.shape[0],
        data=middle.shape[0],
    )


def _ranks(matrices: torch.Tensor, tolerance: float | None) -> torch.Tensor:
    """How many eigenvalues of all the matrices stand above zero."""
    values = torch.linalg.eigvalsh(matrices)
    if tolerance is None:
        tolerance = values.shape[-1] * torch.finfo(values.dtype).eps
    return (values > tolerance * values.amax(-1, keepdim=True)).sum()
