"""Steps of layers: a matrix, a convolution at the size of its channels, normalisations."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.expected.frontier import Step
from gaussnewton.expected.layout import Layout
from gaussnewton.expected.region import Place
from gaussnewton.gram import widened
from gaussnewton.layers.convolution import Convolution
from gaussnewton.layers.normalisation import BY_ENTRY, normalised


class MatrixStep(Step):
    """y = W x + b at each position: Wᵀ S W and Wᵀ B, exactly."""

    def __init__(self, input: Place, weight: Float[Tensor, "out in"]) -> None:
        self.inputs, self.W = (input,), widened(weight.detach())

    def second(self, S: Float[Tensor, "c c"]) -> dict[tuple[int, int], Tensor]:
        W = self.W.to(S)
        return {(0, 0): W.mT @ S @ W}

    def cross(self, B: Float[Tensor, "c e"]) -> list[Tensor | None]:
        return [self.W.to(B).mT @ B]


class ConvolutionStep(Step):
    r"""A convolution between two feature maps, each kept as channels.

    :math:`y_q = \sum_k W_k x_{sq + dk - p}` in every dimension, with stride s, dilation d and
    padding p. Each of the |Q| positions of y has the expected matrix S/|Q|, without correlation,
    so that

    .. math:: S_x = \sum_k \frac{|\{q : sq + dk - p \text{ inside}\}|}{|Q|} W_k^T S W_k.

    From a position to the same position only the taps with :math:`sq + dk - p = q` lead.

    Args:
        input: x.
        module: the layer.
        layout: of y.
        own: of x.
    """

    def __init__(self, input: Place, module: Convolution, layout: Layout, own: Layout) -> None:
        self.inputs = (input,)
        self.taps = _taps(module)
        inside, same = zip(*(_shares(module, i, layout, own) for i in range(len(own.spatial))), strict=True)
        self.inside = [_product(inside, k) for k in product(*map(range, module.kernel_size))]
        self.same = [_product(same, k) for k in product(*map(range, module.kernel_size))]
        self.keeps = layout.spatial == own.spatial

    def second(self, S: Float[Tensor, "c c"]) -> dict[tuple[int, int], Tensor]:
        total: Tensor | float = 0.0
        for W, share in zip(self.taps.to(S), self.inside, strict=True):
            if share:
                total = total + share * (W.mT @ S @ W)
        assert isinstance(total, Tensor)
        return {(0, 0): total}

    def cross(self, B: Float[Tensor, "c e"]) -> list[Tensor | None]:
        if not self.keeps:
            return [None]
        shares = torch.tensor(self.same, dtype=B.dtype, device=B.device)
        return [torch.einsum("k,koi->oi", shares, self.taps.to(B)).mT @ B]


def _taps(module: Convolution) -> Float[Tensor, "k out in"]:
    """W_k of each place of the kernel, between all channels, zero between those of other groups."""
    weight = widened(module.weight.detach()).flatten(2).movedim(2, 0)  # k, out, in / groups
    return torch.stack([torch.block_diag(*W.chunk(module.groups)) for W in weight])


def _shares(
    module: Convolution, i: int, layout: Layout, own: Layout
) -> tuple[list[float], list[float]]:
    """For each k of one dimension, the share of positions whose tap is inside; or is at home."""
    # Pairs of the amounts before and after, the last dimension first.
    before = module._reversed_padding_repeated_twice[2 * (len(module.kernel_size) - 1 - i)]
    q = torch.arange(layout.spatial[i])
    inside, same = [], []
    for k in range(module.kernel_size[i]):
        reached = module.stride[i] * q + module.dilation[i] * k - before
        there = (reached >= 0) & (reached < own.spatial[i])
        # Other paddings than zeros show the tap some position of the image.
        padded = module.padding_mode != "zeros"
        inside.append(1.0 if padded else float(there.double().mean()))
        same.append(float((reached == q).double().mean()))
    return inside, same


def _product(shares: tuple[list[float], ...], k: tuple[int, ...]) -> float:
    result = 1.0
    for own, index in zip(shares, k, strict=True):
        result *= own[index]
    return result


class EntryNormStep(Step):
    r"""``LayerNorm`` and ``RMSNorm`` over the channels.

    With x̂ the normalised input and σ what it was divided by,
    :math:`J = \mathrm{diag}(w) (C - x̂x̂^T/d)/σ`, C being :math:`I - 11^T/d`, or I where no mean is
    taken. With :math:`K = \mathrm{diag}(w) S \mathrm{diag}(w)` and C x̂ = x̂,

    .. math:: E[J^T S J] = E[σ^{-2}] CKC - (CK E[x̂x̂^T/σ^2] + …^T)/d + E[x̂ (x̂^T K x̂) x̂^T/σ^2]/d^2.
    """

    def __init__(self, input: Place, module: Any, values: Tensor, own: Layout) -> None:
        self.inputs = (input,)
        x = widened(own.gather(values)).flatten(0, 1)
        self.hat = widened(own.gather(normalised(module, values))).flatten(0, 1)
        self.centred = isinstance(module, nn.LayerNorm)
        eps = module.eps if module.eps is not None else torch.finfo(values.dtype).eps
        power = x.var(1, correction=0) if self.centred else x.square().mean(1)
        self.inverse = (power + eps).rsqrt()
        weight = module.weight
        self.w = torch.ones_like(x[0]) if weight is None else widened(weight.detach()).reshape(-1)

    def second(self, S: Float[Tensor, "c c"]) -> dict[tuple[int, int], Tensor]:
        hat, inverse, w = self.hat.to(S), self.inverse.to(S), self.w.to(S)
        count, d = hat.shape
        K = self._centre(self._centre(w.unsqueeze(1) * S * w).mT)
        scaled = hat * inverse.unsqueeze(1)
        mixed = K @ (scaled.mT @ scaled) / (count * d)
        bent = scaled * ((hat @ K) * hat).sum(1, keepdim=True)
        return {
            (0, 0): inverse.square().mean() * K
            - (mixed + mixed.mT)
            + bent.mT @ scaled / (count * d**2)
        }

    def cross(self, B: Float[Tensor, "c e"]) -> list[Tensor | None]:
        hat, inverse, w = self.hat.to(B), self.inverse.to(B), self.w.to(B)
        count, d = hat.shape
        weighted = w.unsqueeze(1) * B
        moment = (hat * inverse.unsqueeze(1)).mT @ (hat @ weighted) / (count * d)
        return [inverse.mean() * self._centre(weighted) - moment]

    def _centre(self, rows: Float[Tensor, "c e"]) -> Float[Tensor, "c e"]:
        return rows - rows.mean(0) if self.centred else rows


def normalises_channels(module: nn.Module, own: Layout) -> bool:
    """Whether a layer normalises over exactly the channels of its input."""
    if not isinstance(module, BY_ENTRY):
        return False
    size = len(module.normalized_shape)
    return own.channels == tuple(range(len(own.shape)))[-size:]


def fixed_slope(module: Any, values: Tensor) -> Tensor:
    """dy/dx of a layer that normalises by channel, its statistics being taken for constants."""
    x = widened(values)
    one = [1] * (x.ndim - 2)
    own = module.running_var
    if module.training or own is None:
        axes = [0, *range(2, x.ndim)]
        variance = x.var(axes, correction=0)
    else:
        variance = widened(own)
    slope = (variance + module.eps).rsqrt()
    if module.weight is not None:
        slope = slope * widened(module.weight.detach())
    return slope.reshape(1, -1, *one).expand_as(x)


def fixed_group_slope(module: Any, values: Tensor) -> Tensor:
    """The same for statistics of each datum: of groups of channels, or of single ones."""
    x = widened(values)
    groups = module.num_groups if isinstance(module, nn.GroupNorm) else x.shape[1]
    variance = x.reshape(x.shape[0], groups, -1).var(2, correction=0)
    slope = (variance + module.eps).rsqrt().repeat_interleave(x.shape[1] // groups, dim=1)
    if module.weight is not None:
        slope = slope * widened(module.weight.detach())
    return slope.reshape(*x.shape[:2], *[1] * (x.ndim - 2)).expand_as(x)
