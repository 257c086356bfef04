"""``nn.GaussianNLLLoss``, its variance given with the targets or predicted by the model."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.errors import BatchError
from gaussnewton.losses.geometry import Geometry
from gaussnewton.losses.registry import register_loss
from gaussnewton.perdatum import Dense, Diagonal, PerDatum
from gaussnewton.perdatum.dense import psd_part


@register_loss(nn.GaussianNLLLoss)
class GaussianNLLGeometry(Geometry):
    """E = ½ (log v + (m − y)² / v) for each element.

    A given variance is a constant: 𝓗_L = 1/v. A variance that depends on the model is an
    output like the mean: the outputs are ``[n, 2, …]``, means then variances, and 𝓗_L is a
    2 × 2 matrix for each element, which depends on y and need not be positive
    semi-definite, so its PSD part is taken.
    """

    criterion: nn.GaussianNLLLoss

    def bind(self, outputs: Any, *targets: Any) -> tuple[Tensor, Any]:
        target, var = targets if len(targets) == 2 else (targets[0], None)
        if isinstance(outputs, tuple) and len(outputs) == 2 and var is None:
            outputs, var = outputs
        if not isinstance(outputs, Tensor) or var is None:
            raise BatchError(
                "GaussianNLLLoss needs a variance: let the model return (mean, var), or give "
                "the targets as (y, var)."
            )
        var = torch.as_tensor(var, dtype=outputs.dtype, device=outputs.device)
        var = _fitted(var, outputs)
        if var.requires_grad:
            return torch.stack([outputs, var], dim=1), (target, None)
        return outputs, (target, var)

    def value(self, outputs: Tensor, targets: Any) -> Tensor:
        target, var = targets
        mean, var = (outputs, var) if var is not None else outputs.unbind(1)
        return super().value(mean, (target, var))

    def check(self, outputs: Tensor, targets: Any) -> None:
        super().check(outputs, targets)
        target, var = targets
        shape = outputs.shape if var is not None else outputs[:, 0].shape
        if target.shape != shape:
            raise BatchError(
                f"GaussianNLLLoss: means have shape {tuple(shape)} but targets "
                f"{tuple(target.shape)}; they must be equal."
            )

    def hessian(self, outputs: Tensor, targets: Any) -> PerDatum:
        mean, target, v = self._parts(outputs, targets)
        if targets[1] is not None:
            return Diagonal(self._factor(mean) / v, mean.shape[0])
        error = mean - target
        cross = -error / v.square()
        corner = error.square() / v**3 - 0.5 / v.square()
        small = torch.stack([1 / v, cross, cross, corner], dim=-1).unflatten(-1, (2, 2))
        small = psd_part(small.flatten(0, 1)).unflatten(0, small.shape[:2])  # n e 2 2
        full = torch.diag_embed(small.movedim(1, -1))  # n 2 2 e e
        full = full.movedim(2, 3).reshape(mean.shape[0], 2 * mean.shape[1], -1)
        return Dense(full * self._factor(mean))

    def sample(
        self, outputs: Tensor, targets: Any, samples: int, generator: torch.Generator
    ) -> Float[Tensor, "n s d"]:
        mean, _, v = self._parts(outputs, targets)
        v = v.unsqueeze(1)
        shape = (mean.shape[0], samples, mean.shape[1])
        noise = torch.randn(shape, generator=generator, dtype=mean.dtype, device=mean.device)
        score = noise / v.sqrt()
        if targets[1] is None:
            score = torch.cat([score, 0.5 * (1 - noise.square()) / v], dim=-1)
        return score * (self._factor(mean) / samples) ** 0.5

    def _parts(self, outputs: Tensor, targets: Any) -> tuple[Tensor, Tensor, Tensor]:
        target, var = targets
        mean, var = (outputs, var) if var is not None else (outputs[:, 0], outputs[:, 1])
        var = var.clamp(min=self.criterion.eps)
        return mean.flatten(1), target.flatten(1), var.flatten(1)

    def _factor(self, mean: Tensor) -> float:
        return 1.0 / mean.numel() if self.averages else 1.0


def _fitted(var: Tensor, mean: Tensor) -> Tensor:
    """The variance in the shape of the mean; torch allows one for each row, or one for all."""
    if var.shape == mean.shape[:-1]:
        var = var.unsqueeze(-1)
    try:
        return var.expand_as(mean)
    except RuntimeError as error:
        raise BatchError(
            f"GaussianNLLLoss: means have shape {tuple(mean.shape)} but variances "
            f"{tuple(var.shape)}; give one for each element, each row, or all."
        ) from error
