"""The mixture of two binary classifiers of section 5.2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from gaussnewton.losses.custom import CustomGeometry, checked_reduction
from gaussnewton.losses.registry import register_loss


class BinaryMixtureLoss(nn.Module):
    r"""−log p(y | h) for a mixture of two binary classifiers (section 5.2).

    .. math:: p(y | h) = σ(h_1) σ(h_2)^y σ(−h_2)^{1−y} + (1 − σ(h_1)) σ(h_3)^y σ(−h_3)^{1−y}

    It is not an exponential family: 𝓗_L depends on y and need not be PSD, and the
    Gauss-Newton and Fisher matrices differ.

    Example:
        >>> import torch, gaussnewton as gn
        >>> criterion = gn.BinaryMixtureLoss()
        >>> round(criterion(torch.zeros(4, 3), torch.tensor([0, 1, 1, 0])).item(), 4)
        0.6931
    """

    def __init__(self, reduction: Literal["mean", "sum"] = "mean") -> None:
        super().__init__()
        self.reduction = checked_reduction(reduction)

    def forward(self, outputs: Float[Tensor, "n 3"], targets: Tensor) -> Float[Tensor, ""]:
        """The negative log-likelihood of targets 0 or 1."""
        terms = -self.log_likelihood(outputs, targets)
        return terms.mean() if self.reduction == "mean" else terms.sum()

    @staticmethod
    def log_likelihood(outputs: Float[Tensor, "n 3"], targets: Tensor) -> Float[Tensor, " n"]:
        """The logarithm of p(y | h) for each datum."""
        gate, first, second = outputs.unbind(1)
        sign = 2 * targets.reshape(-1).to(outputs.dtype) - 1
        return torch.logaddexp(
            logsigmoid(gate) + logsigmoid(sign * first),
            logsigmoid(-gate) + logsigmoid(sign * second),
        )

    def support(
        self, outputs: Float[Tensor, "n 3"]
    ) -> Iterator[tuple[Tensor, Float[Tensor, " n"]]]:
        """Every value that y can take, with its probability under the model."""
        for y in (0.0, 1.0):
            targets = outputs.new_full((outputs.shape[0],), y)
            yield targets, self.log_likelihood(outputs, targets).exp()

    def sample(self, outputs: Float[Tensor, "n 3"], generator: torch.Generator) -> Tensor:
        """Targets drawn from the model."""
        p = self.log_likelihood(outputs, outputs.new_ones(outputs.shape[0])).exp()
        return torch.bernoulli(p, generator=generator)


register_loss(BinaryMixtureLoss)(CustomGeometry)
