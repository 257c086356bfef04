"""f' and f'' of known elementwise functions, from what autograd saved of them.

The rules save a second and a third pass through the graph; without one the same numbers
come from automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """The derivatives of an elementwise function at the values that autograd saved.

    Attributes:
        saved: what autograd saved, shaped as the function's output.
        slope: f'.
        bend: f''.
        backward: ``backward(g, saved, out)`` writes g ⊙ f', without f' ever being stored.
    """

    saved: Tensor
    slope: Callable[[Tensor], Tensor]
    bend: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]


def _tanh(node: Any) -> Activation:
    def slope(f: Tensor) -> Tensor:
        return torch.addcmul(torch.ones((), dtype=f.dtype, device=f.device), f, f, value=-1)

    return Activation(
        node._saved_result.detach(),
        slope,
        lambda f: -2 * f * slope(f),
        lambda g, f, out: _aten.tanh_backward.grad_input(g, f, grad_input=out),
    )


def _sigmoid(node: Any) -> Activation:
    return Activation(
        node._saved_result.detach(),
        lambda f: torch.addcmul(f, f, f, value=-1),
        lambda f: f * (1 - f) * (1 - 2 * f),
        lambda g, f, out: _aten.sigmoid_backward.grad_input(g, f, grad_input=out),
    )


def _relu(node: Any) -> Activation:
    return Activation(
        node._saved_result.detach(),
        lambda f: (f > 0).to(f.dtype),
        torch.zeros_like,
        lambda g, f, out: _aten.threshold_backward.grad_input(g, f, 0, grad_input=out),
    )


def _leaky_relu(node: Any) -> Activation:
    negative = node._saved_negative_slope
    return Activation(
        node._saved_self.detach(),
        lambda h: torch.where(h > 0, torch.ones_like(h), negative),
        torch.zeros_like,
        lambda g, h, out: _aten.leaky_relu_backward.grad_input(
            g, h, negative, False, grad_input=out
        ),
    )


RULES: dict[str, Callable[[Any], Activation]] = {
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
