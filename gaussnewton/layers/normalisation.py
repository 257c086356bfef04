"""Layers that normalise, then scale and shift each channel or entry."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.layers.rule import SmallRule, register_layer
from gaussnewton.precision import widened

BY_CHANNEL = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.GroupNorm,
)
BY_ENTRY = (nn.LayerNorm, nn.RMSNorm)


class NormalisationRule(SmallRule):
    """y = w ⊙ x̂ + b: w and b of channels, or of the last dimensions' entries."""

    def fits(self, module: Any) -> bool:
        return set(module._parameters) <= {"weight", "bias"}

    def parameter_rows(
        self, module: Any, input: Tensor, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "k n size"]:
        parts = []
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                felt = rows * widened(normalised(module, input)) if name == "weight" else rows
                parts.append(_summed(module, felt))
        return torch.cat(parts, dim=2)


for kind in (*BY_CHANNEL, *BY_ENTRY):
    register_layer(kind)(NormalisationRule)


def normalised(module: Any, input: Tensor) -> Tensor:
    """x̂: what the layer would return with w = 1 and b = 0.

    Example:
        >>> import torch
        >>> from gaussnewton.layers.normalisation import normalised
        >>> layer = torch.nn.LayerNorm(2, eps=0)
        >>> normalised(layer, torch.tensor([[1.0, 3.0]]))
        tensor([[-1.,  1.]])
    """
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(input, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(input, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(input, module.num_groups, eps=module.eps)
    mean, variance = module.running_mean, module.running_var
    if isinstance(module, (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)):
        if module.training or not module.track_running_stats:
            return F.instance_norm(input, eps=module.eps)
        return F.instance_norm(input, mean, variance, use_input_stats=False, eps=module.eps)
    if module.training or mean is None:
        return F.batch_norm(input, None, None, training=True, eps=module.eps)
    return F.batch_norm(input, mean, variance, eps=module.eps)


def _summed(module: Any, felt: Float[Tensor, "k n *out"]) -> Float[Tensor, "k n size"]:
    """Over all positions that one entry of w serves."""
    if isinstance(module, BY_ENTRY):
        size = len(module.normalized_shape)
        return (
            felt.flatten(felt.ndim - size).flatten(2, -2).sum(2)
            if felt.ndim > 2 + size
            else (felt.flatten(2))
        )
    return felt.flatten(3).sum(3) if felt.ndim > 3 else felt
