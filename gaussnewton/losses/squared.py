"""``nn.MSELoss``."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.losses.geometry import ElementwiseGeometry
from gaussnewton.losses.registry import register_loss
from gaussnewton.perdatum import Diagonal


@register_loss(nn.MSELoss)
class SquaredErrorGeometry(ElementwiseGeometry):
    """E = Σ (h − y)²: 𝓗_L = 2 I, the same for all data.

    As a model: h is the mean of a Gaussian of variance 1/2.
    """

    nonnegative = True

    def hessian(self, outputs: Tensor, targets: Tensor) -> Diagonal:  # noqa: ARG002
        width = outputs[0].numel()
        value = 2.0 * self.factor(outputs)
        return Diagonal(outputs.new_full((1, width), value), outputs.shape[0])

    def sample(
        self,
        outputs: Tensor,
        targets: Tensor,  # noqa: ARG002
        samples: int,
        generator: torch.Generator,
    ) -> Float[Tensor, "n s d"]:
        n, d = outputs.flatten(1).shape
        noise = torch.randn(
            n, samples, d, generator=generator, dtype=outputs.dtype, device=outputs.device
        )
        return noise.mul_((2.0 * self.factor(outputs) / samples) ** 0.5)
