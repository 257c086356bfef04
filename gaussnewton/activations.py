"""f' and f'' of known elementwise functions, from what autograd saved of them.

The rules save a second and a third pass through the graph; without one the same numbers
come from automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Derivatives = Callable[[Any], tuple[Tensor, Callable[[], Tensor]]]
"""From a node of the graph to f' and, when asked for, f''."""


def _tanh(node: Any) -> tuple[Tensor, Callable[[], Tensor]]:
    f = node._saved_result.detach()
    slope = torch.addcmul(torch.ones((), dtype=f.dtype, device=f.device), f, f, value=-1)
    return slope, lambda: -2 * f * slope


def _sigmoid(node: Any) -> tuple[Tensor, Callable[[], Tensor]]:
    f = node._saved_result.detach()
    slope = torch.addcmul(f, f, f, value=-1)
    return slope, lambda: slope * (1 - 2 * f)


def _relu(node: Any) -> tuple[Tensor, Callable[[], Tensor]]:
    f = node._saved_result.detach()
    return (f > 0).to(f.dtype), lambda: torch.zeros_like(f)


def _leaky_relu(node: Any) -> tuple[Tensor, Callable[[], Tensor]]:
    h = node._saved_self.detach()
    slope = torch.where(h > 0, torch.ones_like(h), node._saved_negative_slope)
    return slope, lambda: torch.zeros_like(h)


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
