"""Steps of layers with a matrix, and of those that normalise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.estimators.expected.frontier import Step
from gaussnewton.estimators.expected.general import GeneralStep, Sums
from gaussnewton.estimators.expected.layout import Layout
from gaussnewton.estimators.expected.region import Place, Region
from gaussnewton.layers.normalisation import BY_ENTRY, normalised
from gaussnewton.precision import widened


class MatrixStep(Step):
    """y = W x + b at each position: Wᵀ M W, exactly."""

    def __init__(self, input: Place, weight: Float[Tensor, "out in"]) -> None:
        self.inputs, self.W = (input,), widened(weight.detach())

    def second(self, M: Float[Tensor, "2 c c"]) -> dict[tuple[int, int], Tensor]:
        W = self.W.to(M)
        return {(0, 0): W.mT @ M @ W}

    def cross(self, M: Float[Tensor, "2 c e"], positions: int) -> list[Tensor]:
        del positions
        return [self.W.to(M).mT @ M]


class EntryNormStep(Step):
    r"""``LayerNorm`` and ``RMSNorm`` over the channels.

    With x̂ the normalised input and σ what it was divided by,
    :math:`J = \mathrm{diag}(w) (C - x̂x̂^T/d)/σ`, C being :math:`I - 11^T/d`, or I where no mean is
    taken. With :math:`K = C\,\mathrm{diag}(w)\,S\,\mathrm{diag}(w)\,C` and C x̂ = x̂,

    .. math:: E[J^T S J] = E[σ^{-2}] K - (K E[x̂x̂^T/σ^2] + …^T)/d + E[x̂ (x̂^T K x̂) x̂^T/σ^2]/d^2.

    Different positions of a datum are taken for independent here: E[J]ᵀ B E[J] between them.
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

    def second(self, M: Float[Tensor, "2 c c"]) -> dict[tuple[int, int], Tensor]:
        D, B = M
        common = self._expected(self._expected(B).mT)
        return {(0, 0): torch.stack([self._second(D + B) - common, common])}

    def cross(self, M: Float[Tensor, "2 c e"], positions: int) -> list[Tensor]:
        del positions
        return [torch.stack([self._expected(part) for part in M])]

    def _second(self, S: Float[Tensor, "c c"]) -> Float[Tensor, "c c"]:
        hat, inverse, w = self.hat.to(S), self.inverse.to(S), self.w.to(S)
        count, d = hat.shape
        K = self._centre(self._centre(w.unsqueeze(1) * S * w).mT)
        scaled = hat * inverse.unsqueeze(1)
        mixed = K @ (scaled.mT @ scaled) / (count * d)
        bent = scaled * ((hat @ K) * hat).sum(1, keepdim=True)
        return inverse.square().mean() * K - mixed - mixed.mT + bent.mT @ scaled / (count * d**2)

    def _expected(self, S: Float[Tensor, "c e"]) -> Float[Tensor, "c e"]:
        """E[J]ᵀ S."""
        hat, inverse = self.hat.to(S), self.inverse.to(S)
        count, d = hat.shape
        weighted = self.w.to(S).unsqueeze(1) * S
        moment = (hat * inverse.unsqueeze(1)).mT @ (hat @ weighted) / (count * d)
        return inverse.mean() * self._centre(weighted) - moment

    def _centre(self, rows: Float[Tensor, "c e"]) -> Float[Tensor, "c e"]:
        return rows - rows.mean(0) if self.centred else rows


class FieldNormStep(GeneralStep):
    """``GroupNorm`` and ``InstanceNorm`` of feature maps.

    What positions have in common goes back exactly, as the statistics take much of it away. Of
    what a position has of its own they take one part in as many entries as they are made of, so
    there they are taken for constants.
    """

    def __init__(
        self, region: Region, layout: Layout, layouts: Sequence[Layout], slope: Tensor
    ) -> None:
        super().__init__(region, layout, layouts, [])
        self.slope = layout.gather(slope)

    def own_sums(self, D: Float[Tensor, "c c"]) -> Sums:
        s = self.slope.to(D)
        same = D * (s.flatten(0, 1).mT @ s.flatten(0, 1) / s.shape[0])
        return {(0, 0): (same, same)}

    @cached_property
    def home_jacobians(self) -> list[Float[Tensor, "c a"]]:
        return [self.slope.mean(0).sum(0).diag()]


def normalises_channels(module: nn.Module, own: Layout) -> bool:
    """Whether a layer normalises over exactly the channels of its input."""
    if not isinstance(module, BY_ENTRY):
        return False
    return own.channels == tuple(range(len(own.shape)))[-len(module.normalized_shape) :]


def fixed_slope(module: Any, values: Tensor) -> Tensor:
    """dy/dx of a layer that normalises by channel, its statistics being taken for constants.

    They are constants in evaluation mode, or of the batch, or, of other layers, of each datum.
    """
    x = widened(values)
    n, channels = x.shape[:2]
    of_batch = isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
    stored = getattr(module, "running_var", None)
    if stored is not None and not module.training:
        variance = widened(stored).unsqueeze(0)
    elif of_batch:
        variance = x.var([0, *range(2, x.ndim)], correction=0).unsqueeze(0)
    else:
        groups = module.num_groups if isinstance(module, nn.GroupNorm) else channels
        grouped = x.reshape(n, groups, -1).var(2, correction=0)
        variance = grouped.repeat_interleave(channels // groups, dim=1)
    slope = (variance + module.eps).rsqrt()
    if module.weight is not None:
        slope = slope * widened(module.weight.detach())
    return slope.reshape(*slope.shape, *[1] * (x.ndim - 2)).expand_as(x)
