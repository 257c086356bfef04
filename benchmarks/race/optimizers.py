"""The torch optimisers of the race."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import _muon as muon_of_torch

import gaussnewton as gn
from race.settings import Setting

TORCHS_OWN = muon_of_torch._zeropower_via_newtonschulz


def orthogonal_in_float32(
    grad: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float
) -> Tensor:
    """Muon's Newton-Schulz iterations in the gradient's own precision."""
    a, b, c = ns_coefficients
    wide = grad if grad.shape[0] <= grad.shape[1] else grad.T
    x = wide / wide.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if grad.shape[0] <= grad.shape[1] else x.T


@cache
def muons_precision() -> str:
    """In which of two precisions Muon's iterations are faster here: its own, or float32.

    bfloat16 takes it several times as long where a processor has no units for it, and half as long
    where one has them.
    """
    matrix = torch.randn(1000, 500)
    seconds = {}
    for name, function in (("bfloat16", TORCHS_OWN), ("float32", orthogonal_in_float32)):
        tried = []
        for _ in range(5):
            begun = time.perf_counter()
            function(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
            tried.append(time.perf_counter() - begun)
        seconds[name] = min(tried)
    return min(seconds, key=lambda name: seconds[name])


def _muon(model: nn.Module, rate: float) -> list[Optimizer]:
    """Muon takes matrices only; what it does not take gets AdamW, as its users do."""
    muon_of_torch._zeropower_via_newtonschulz = (
        TORCHS_OWN if muons_precision() == "bfloat16" else orthogonal_in_float32
    )
    inside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    matrices = [p for p in model.parameters() if id(p) in inside]
    others = [p for p in model.parameters() if id(p) not in inside]
    return [
        # So adjusted, its steps are as large as AdamW's at the same rate.
        torch.optim.Muon(matrices, rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, rate, weight_decay=0.0),
    ]


def _soap(model: nn.Module, rate: float) -> list[Optimizer]:
    from pytorch_optimizer import SOAP

    return [SOAP(model.parameters(), lr=rate, weight_decay=0.0)]


def _shampoo(model: nn.Module, rate: float) -> list[Optimizer]:
    """By default its roots are computed every 1000 updates, which is never in such a race."""
    from pytorch_optimizer import ScalableShampoo
    from pytorch_optimizer.optimizer.shampoo import LayerWiseGrafting

    graft = LayerWiseGrafting.RMSPROP
    chosen: dict[str, Any] = {"graft_type": graft, "preconditioning_compute_steps": 20}
    # RMSProp's first steps, without a correction of its mean, are 1/√(1 − β₂) times too large.
    chosen |= {"betas": (0.9, 0.99), "moving_average_for_momentum": True}
    return [ScalableShampoo(model.parameters(), lr=rate, **chosen)]


FIRST_ORDER: dict[str, Callable[[nn.Module, float], list[Optimizer]]] = {
    "adam": lambda model, rate: [torch.optim.Adam(model.parameters(), rate)],
    "nadamw": lambda model, rate: [
        torch.optim.NAdam(
            model.parameters(), rate, weight_decay=0.0, decoupled_weight_decay=True
        )
    ],
    "nesterov": lambda model, rate: [
        torch.optim.SGD(model.parameters(), rate, momentum=0.9, nesterov=True)
    ],
    "muon": _muon,
    "muon-halved": _muon,
    "soap": _soap,
    "soap-halved": _soap,
    "shampoo": _shampoo,
}  # fmt: skip


def build(runner: str, model: nn.Module, criterion: nn.Module, setting: Setting) -> list[Optimizer]:
    """The optimisers that together train a model."""
    if runner == "default":
        return [gn.GaussNewton(model, criterion)]
    if runner == "paper":
        return [gn.GaussNewton(model, criterion, **gn.PAPER)]
    return FIRST_ORDER[runner](model, setting["rate"])
