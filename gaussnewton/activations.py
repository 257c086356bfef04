"""f' and f'' of known elementwise functions, from what autograd saved of them.

The rules save a second and a third pass through the graph; without one the same numbers
come from automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Derivatives = Callable[[Any], tuple[Tensor, Tensor]]


def _tanh(node: Any) -> tuple[Tensor, Tensor]:
    f = node._saved_result.detach()
    slope = 1 - f.square()
    return slope, -2 * f * slope


def _sigmoid(node: Any) -> tuple[Tensor, Tensor]:
    f = node._saved_result.detach()
    slope = f * (1 - f)
    return slope, slope * (1 - 2 * f)


def _relu(node: Any) -> tuple[Tensor, Tensor]:
    f = node._saved_result.detach()
    return (f > 0).to(f.dtype), torch.zeros((), dtype=f.dtype, device=f.device).expand_as(f)


def _leaky_relu(node: Any) -> tuple[Tensor, Tensor]:
    h = node._saved_self.detach()
    slope = torch.where(h > 0, torch.ones_like(h), node._saved_negative_slope)
    return slope, torch.zeros((), dtype=h.dtype, device=h.device).expand_as(h)


RULES: dict[str, Derivatives] = {
    "TanhBackward0": _tanh,
    "SigmoidBackward0": _sigmoid,
    "ReluBackward0": _relu,
    "LeakyReluBackward0": _leaky_relu,
}

# Nodes that move no entry past another and change no value.
REORDERS_NOTHING = frozenset(
    {
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "UnsqueezeBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
        "AliasBackward0",
        "CloneBackward0",
    }
)
