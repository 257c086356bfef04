"""How far KFRA's nested expectation is from the exact one (section 3.5, appendix C.4)."""

from __future__ import annotations

from typing import Any

from torch import nn

from gaussnewton.blocks import KroneckerBlock
from gaussnewton.estimate import curvature


def recursion_distance(model: nn.Module, criterion: Any, batch: Any) -> dict[str, float]:
    """‖Ĝ_λ − E[𝒢_λ]‖ / ‖E[𝒢_λ]‖ of each layer, for KFRA's Ĝ.

    Zero for one datum, and always at the last layer, where the recursion starts. Layers whose
    blocks have no G, as those that normalise, are left out.

    Example:
        >>> import torch, gaussnewton as gn
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(),
        ...                             torch.nn.Linear(3, 2)).double()
        >>> x, y = torch.randn(9, 4).double(), torch.randn(9, 2).double()
        >>> one = gn.diagnostics.recursion_distance(model, torch.nn.MSELoss(), (x[:1], y[:1]))
        >>> max(one.values()) < 1e-12
        True
    """
    kfra = curvature(model, criterion, batch, method="kfra")
    kflr = curvature(model, criterion, batch, method="kflr")
    distances = {}
    for name in kflr:
        recursive, exact = kfra[name], kflr[name]
        if not (isinstance(recursive, KroneckerBlock) and isinstance(exact, KroneckerBlock)):
            continue
        distances[name] = float((recursive.G - exact.G).norm() / exact.G.norm())
    return distances
