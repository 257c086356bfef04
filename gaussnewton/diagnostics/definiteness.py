"""Lemma 1: Hessian blocks of piecewise-linear networks are PSD, and Gauss-Newton's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gaussnewton import exact
from gaussnewton.estimate import curvature


@dataclass(frozen=True)
class BlockFacts:
    """A layer's Hessian block beside its Gauss-Newton block.

    Attributes:
        smallest: the smallest eigenvalue of the Hessian block.
        largest: its largest.
        distance: ‖H_λ − Ḡ_λ‖ / ‖Ḡ_λ‖ in the Frobenius norm.
        trace: of the Hessian block. The traces of all layers add up to that of the whole
            Hessian, so if none is negative the point is no strict local maximum (lemma 2).
    """

    smallest: float
    largest: float
    distance: float
    trace: float

    def is_psd(self, tolerance: float = 1e-10) -> bool:
        """Whether no eigenvalue is below zero by more than rounding."""
        return self.smallest >= -tolerance * max(abs(self.largest), abs(self.smallest))


def block_facts(model: nn.Module, criterion: Any, batch: Any) -> dict[str, BlockFacts]:
    """Eigenvalues of each layer's Hessian block, and its distance from Gauss-Newton.

    Where all functions between layers are piecewise linear and the loss is convex, every
    block is positive semi-definite and the distance is zero (lemma 1, section 3.3).

    Example:
        >>> import torch, gaussnewton as gn
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(8, 3).double(), torch.randn(8, 2).double()
        >>> for act in (torch.nn.ReLU(), torch.nn.Tanh()):
        ...     model = torch.nn.Sequential(torch.nn.Linear(3, 4), act, torch.nn.Linear(4, 2))
        ...     facts = gn.diagnostics.block_facts(model.double(), torch.nn.MSELoss(), (x, y))
        ...     print(facts["0"].is_psd(), facts["0"].distance < 1e-10)
        True True
        False False
    """
    hessian = curvature(model, criterion, batch, method="hessian")
    gauss_newton = exact.gauss_newton_blocks(model, criterion, batch)
    facts = {}
    for name, block in hessian.items():
        H, G = block.dense(), gauss_newton[name]
        values = torch.linalg.eigvalsh(H)
        scale = G.norm().clamp(min=torch.finfo(G.dtype).tiny)
        facts[name] = BlockFacts(
            smallest=float(values[0]),
            largest=float(values[-1]),
            distance=float((H - G).norm() / scale),
            trace=float(block.trace()),
        )
    return facts
