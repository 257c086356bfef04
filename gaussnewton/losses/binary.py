"""``nn.BCEWithLogitsLoss``."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.losses.geometry import ElementwiseGeometry
from gaussnewton.losses.registry import register_loss
from gaussnewton.perdatum import Diagonal


@register_loss(nn.BCEWithLogitsLoss)
class BernoulliGeometry(ElementwiseGeometry):
    """Each output is the logit of a Bernoulli variable: 𝓗_L = w σ(h) σ(−h).

    The weight w = weight · (pos_weight · y + 1 − y) belongs to the datum as observed;
    the model distribution is the plain Bernoulli.
    """

    criterion: nn.BCEWithLogitsLoss
    nonnegative = True

    def hessian(self, outputs: Tensor, targets: Tensor) -> Diagonal:
        p = outputs.sigmoid()
        values = self._weights(outputs, targets) * p * (1 - p)
        return Diagonal(values.flatten(1), outputs.shape[0])

    def sample(
        self, outputs: Tensor, targets: Tensor, samples: int, generator: torch.Generator
    ) -> Float[Tensor, "n s d"]:
        p = outputs.sigmoid().flatten(1).unsqueeze(1)
        drawn = torch.rand(
            p.shape[0], samples, p.shape[2], generator=generator, dtype=p.dtype, device=p.device
        )
        weights = self._weights(outputs, targets).flatten(1).unsqueeze(1)
        return (p - (drawn < p).to(p.dtype)) * (weights / samples).sqrt()

    def _weights(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights = torch.full_like(outputs, self.factor(outputs))
        if self.criterion.weight is not None:
            weights = weights * self.criterion.weight.to(outputs)
        if self.criterion.pos_weight is not None:
            weights = weights * (1 + (self.criterion.pos_weight.to(outputs) - 1) * targets)
        return weights.clamp(min=0)  # the PSD part, should a weight be negative
