"""``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.gram import widened
from gaussnewton.layers.rule import MatrixRule, register_layer

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@register_layer(nn.Conv1d)
@register_layer(nn.Conv2d)
@register_layer(nn.Conv3d)
class ConvolutionRule(MatrixRule):
    """A matrix ``[out, in · kernel]`` that multiplies the patch around each output pixel.

    With groups, one such matrix for each group of channels.
    """

    def fits(self, module: Convolution) -> bool:
        own = module._parameters
        return set(own) <= {"weight", "bias"} and own.get("weight") is not None

    def positions(self, module: Convolution, input: Tensor) -> Float[Tensor, "n r groups columns"]:
        windows = patches(module, widened(_batched(module, input)))
        ones = torch.ones_like(windows[..., :1])
        bias = module.bias is not None and module.bias.requires_grad
        if not module.weight.requires_grad:
            return ones
        return torch.cat([windows, ones], dim=3) if bias else windows

    def gradients(
        self, module: Convolution, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "k n r groups out"]:
        k, n, channels = rows.shape[:3]
        by_group = rows.reshape(k, n, module.groups, channels // module.groups, -1)
        return by_group.permute(0, 1, 4, 2, 3)


def patches(module: Any, input: Tensor) -> Float[Tensor, "n r groups patch"]:
    """The patch of the padded input that each output pixel sees, in the order of the weight.

    Example:
        >>> import torch
        >>> from gaussnewton.layers.convolution import patches
        >>> layer = torch.nn.Conv1d(1, 1, kernel_size=2)
        >>> patches(layer, torch.tensor([[[1.0, 2.0, 3.0]]])).squeeze()
        tensor([[1., 2.],
                [2., 3.]])
    """
    x = _padded(module, input)
    dimensions = len(module.kernel_size)
    for i in range(dimensions):
        span = (module.kernel_size[i] - 1) * module.dilation[i] + 1
        x = x.unfold(2 + i, span, module.stride[i])[..., :: module.dilation[i]]
    # n, channels, positions in each dimension, kernel in each dimension
    pixels = x.shape[2 : 2 + dimensions].numel()
    x = x.reshape(x.shape[0], module.groups, -1, pixels, x.shape[2 + dimensions :].numel())
    return x.permute(0, 3, 1, 2, 4).flatten(3)


def _padded(module: Any, input: Tensor) -> Tensor:
    # Pairs of the amounts before and after, the last dimension first, as F.pad wants them.
    amounts: list[int] = list(module._reversed_padding_repeated_twice)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(input, amounts, mode=mode) if any(amounts) else input


def _batched(module: Convolution, input: Any) -> Tensor:
    """One image alone has no dimension for data."""
    return input if input.ndim == len(module.kernel_size) + 2 else input.unsqueeze(0)
