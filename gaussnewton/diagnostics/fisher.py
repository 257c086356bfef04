"""Are the Fisher and Gauss-Newton matrices the same? (appendix C)."""

from __future__ import annotations

from typing import Any

from torch import nn

from gaussnewton import exact


def fisher_distance(model: nn.Module, criterion: Any, batch: Any) -> float:
    """‖F̄ − Ḡ‖ / ‖Ḡ‖, in the Frobenius norm.

    Zero where the outputs are the natural parameters of an exponential family, whose
    𝓗_L does not depend on the target (eq. gn:indep); in general not.

    Example:
        >>> import torch, gaussnewton as gn
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(4, 3).double()
        >>> x, y = torch.randn(6, 4).double(), torch.tensor([0, 1, 1, 0, 0, 1])
        >>> gn.diagnostics.fisher_distance(model, torch.nn.CrossEntropyLoss(), (x, y)) < 1e-12
        True
        >>> gn.diagnostics.fisher_distance(model, gn.BinaryMixtureLoss(), (x, y)) > 0.1
        True
    """
    G = exact.gauss_newton(model, criterion, batch)
    F = exact.fisher(model, criterion, batch)
    return float((F - G).norm() / G.norm())
