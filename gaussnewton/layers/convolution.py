"""``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.gram import bordered_gram, gram
from gaussnewton.layers.rule import MatrixRule, register_layer
from gaussnewton.layers.shifted import Lines, line_sums, shifted_gram
from gaussnewton.precision import widened
from gaussnewton.tiles import tiled_each

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
        if not module.weight.requires_grad:
            return ones
        return torch.cat([windows, ones], dim=3) if _trains_bias(module) else windows

    def gradients(
        self, module: Convolution, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "k n r groups out"]:
        k, n, channels = rows.shape[:3]
        by_group = rows.reshape(k, n, module.groups, channels // module.groups, -1)
        return by_group.permute(0, 1, 4, 2, 3)

    def second_moment(
        self, module: Convolution, input: Tensor, largest: int | None = None
    ) -> tuple[Float[Tensor, "groups columns b"], int]:
        moment, count = self._whole_moment(module, input)  # it shares products across tiles
        return tiled_each(moment, largest), count

    def _whole_moment(
        self, module: Convolution, input: Tensor
    ) -> tuple[Float[Tensor, "groups columns columns"], int]:
        x = widened(_batched(module, input))
        if not module.weight.requires_grad:
            return super().second_moment(module, input)
        if _moves_by_lines(module):
            return _moment_by_lines(module, x)
        windows = patches(module, x).flatten(0, 1)
        square = bordered_gram if _trains_bias(module) else gram
        return torch.stack([square(windows[:, g]) for g in range(module.groups)]), len(windows)

    def gradient_moment(
        self, module: Convolution, rows: Float[Tensor, "k n *out"], largest: int | None = None
    ) -> Float[Tensor, "groups out b"]:
        k, n, channels = rows.shape[:3]
        g = rows.reshape(k * n, module.groups, channels // module.groups, -1)
        if g.shape[2] > g.shape[3] or rows.stride(2) == 1:
            return super().gradient_moment(module, rows, largest)
        # One product an image takes them as they lie: sorting them by pixels would copy them.
        return tiled_each((g @ g.mT).sum(0), largest)

    def moment_entries(self, module: Convolution, input: Tensor) -> int:
        one = _batched(module, input)[:1].detach()
        x, _ = _lines(module, one) if _moves_by_lines(module) else (patches(module, one), None)
        return x.numel() + _padded(module, one).numel()


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
    dimensions = len(module.kernel_size)
    x = _unfolded(module, _padded(module, input), range(dimensions))
    pixels = x.shape[2 : 2 + dimensions].numel()
    x = x.reshape(x.shape[0], module.groups, -1, pixels, x.shape[2 + dimensions :].numel())
    return x.permute(0, 3, 1, 2, 4).flatten(3)


def _unfolded(module: Any, x: Tensor, dimensions: Iterable[int]) -> Tensor:
    """A view: n, channels, positions in each dimension, then kernel in those asked for."""
    for i in dimensions:
        span = (module.kernel_size[i] - 1) * module.dilation[i] + 1
        x = x.unfold(2 + i, span, module.stride[i])[..., :: module.dilation[i]]
    return x


def _moves_by_lines(module: Convolution) -> bool:
    """Whether shifts of the input by lines are the kernel's own, and save something."""
    return module.groups == 1 and module.stride[0] == 1 and module.kernel_size[0] > 1


def _moment_by_lines(
    module: Convolution, x: Tensor
) -> tuple[Float[Tensor, "1 columns columns"], int]:
    lines, along = _lines(module, x)
    count = along.outputs * lines.shape[1]
    channels, patch = module.in_channels, module.weight[0].numel()
    split = (along.kernel, channels, patch // (along.kernel * channels))
    moment = shifted_gram(lines, along).view(*split, *split).permute(1, 0, 2, 4, 3, 5)
    if not _trains_bias(module):
        return moment.reshape(1, patch, patch), count
    result = x.new_empty(1, patch + 1, patch + 1)
    result[0, :-1, :-1] = moment.reshape(patch, patch)
    border = line_sums(lines, along).view(split).transpose(0, 1).reshape(-1)
    result[0, -1, :-1] = result[0, :-1, -1] = border
    result[0, -1, -1] = count
    return result, count


def _lines(module: Convolution, x: Tensor) -> tuple[Float[Tensor, "lines m width"], Lines]:
    """The input by lines, patched in all other dimensions; lines of zeros are only counted."""
    amounts = _amounts(module)
    before, after = amounts[-2:]
    span = (module.kernel_size[0] - 1) * module.dilation[0] + 1
    outputs = x.shape[2] + before + after - span + 1
    if module.padding_mode == "zeros":
        x = F.pad(x, amounts[:-2]) if any(amounts[:-2]) else x
    else:
        x, before = _padded(module, x), 0
    dimensions = len(module.kernel_size)
    x = _unfolded(module, x, range(1, dimensions))
    width = module.in_channels * x.shape[2 + dimensions :].numel()
    order = (2, 0, *range(3, 2 + dimensions), 1, *range(2 + dimensions, x.ndim))
    lines = x.permute(order).reshape(x.shape[2], -1, width)
    return lines, Lines(module.kernel_size[0], module.dilation[0], before, outputs)


def _padded(module: Any, input: Tensor) -> Tensor:
    amounts = _amounts(module)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(input, amounts, mode=mode) if any(amounts) else input


def _amounts(module: Any) -> list[int]:
    """Pairs of the padding before and after, the last dimension first, as F.pad wants them."""
    return list(module._reversed_padding_repeated_twice)


def _trains_bias(module: Convolution) -> bool:
    return module.bias is not None and module.bias.requires_grad


def _batched(module: Convolution, input: Any) -> Tensor:
    """One image alone has no dimension for data."""
    return input if input.ndim == len(module.kernel_size) + 2 else input.unsqueeze(0)
