"""``nn.PoissonNLLLoss``."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.losses.geometry import ElementwiseGeometry
from gaussnewton.losses.registry import register_loss
from gaussnewton.perdatum import Diagonal


@register_loss(nn.PoissonNLLLoss)
class PoissonGeometry(ElementwiseGeometry):
    """Each output is the rate of a Poisson variable, or its logarithm.

    With ``log_input`` E = exp(h) − y h, the natural parameter, and 𝓗_L = exp(h). Without,
    E = h − y log(h + ε) and 𝓗_L = y / (h + ε)², which depends on the target: there the
    Fisher matrix that KFAC samples, 1/h, is another one.
    """

    criterion: nn.PoissonNLLLoss

    def hessian(self, outputs: Tensor, targets: Tensor) -> Diagonal:
        if self.criterion.log_input:
            values = outputs.exp()
        else:
            values = (targets / (outputs + self.criterion.eps).square()).clamp(min=0)
        return Diagonal(values.flatten(1) * self.factor(outputs), outputs.shape[0])

    def sample(
        self,
        outputs: Tensor,
        targets: Tensor,  # noqa: ARG002
        samples: int,
        generator: torch.Generator,
    ) -> Float[Tensor, "n s d"]:
        h = outputs.flatten(1).unsqueeze(1).expand(-1, samples, -1)
        rate = h.exp() if self.criterion.log_input else h.clamp(min=0)
        drawn = torch.poisson(rate, generator=generator)
        score = rate - drawn if self.criterion.log_input else 1 - drawn / (h + self.criterion.eps)
        return score * (self.factor(outputs) / samples) ** 0.5
