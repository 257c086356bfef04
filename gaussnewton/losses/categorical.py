"""``nn.CrossEntropyLoss`` and ``nn.NLLLoss``."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.errors import BatchError
from gaussnewton.losses.geometry import Geometry
from gaussnewton.losses.registry import register_loss
from gaussnewton.perdatum import Softmax


class CategoricalGeometry(Geometry):
    """Outputs ``[n, classes, …]`` that give class probabilities p at each position.

    𝓗_L = w (diag(p) − p pᵀ) with the weight w that a position has in the scalar.
    """

    criterion: nn.CrossEntropyLoss | nn.NLLLoss
    nonnegative = True

    def probabilities(self, outputs: Tensor) -> Float[Tensor, "n c s"]:
        """p, for the outputs with all positions in one dimension."""
        return outputs.reshape(*outputs.shape[:2], -1).softmax(1)

    def check(self, outputs: Tensor, targets: Any) -> None:
        super().check(outputs, targets)
        name = type(self.criterion).__name__
        if not isinstance(targets, Tensor):
            raise BatchError(f"{name}: targets are {type(targets).__name__}, not a tensor.")
        expected = outputs.shape if targets.is_floating_point() else _without_classes(outputs)
        if targets.shape != expected:
            raise BatchError(
                f"{name}: outputs of shape {tuple(outputs.shape)} (data, classes, positions …) "
                f"need targets of shape {tuple(expected)}, not {tuple(targets.shape)}."
            )
        if not targets.is_floating_point():
            counted = targets[targets != self.criterion.ignore_index]
            if not counted.numel() and self.averages:
                raise BatchError(
                    f"{name}: all {targets.numel()} targets are ignore_index "
                    f"({self.criterion.ignore_index}), so the batch has no loss. Skip it."
                )
            if (
                counted.numel()
                and not 0 <= int(counted.min()) <= int(counted.max()) < outputs.shape[1]
            ):
                raise BatchError(
                    f"{name}: class indices run from {int(counted.min())} to "
                    f"{int(counted.max())}, but the outputs have {outputs.shape[1]} classes."
                )

    def weight(self, outputs: Tensor, targets: Tensor) -> float:
        return float(self._divisor(outputs, targets))

    def hessian(self, outputs: Tensor, targets: Tensor) -> Softmax:
        return Softmax(self.probabilities(outputs), self._weights(outputs, targets))

    def sample(
        self, outputs: Tensor, targets: Tensor, samples: int, generator: torch.Generator
    ) -> Float[Tensor, "n s d"]:
        p = self.probabilities(outputs)
        flat = p.transpose(1, 2).reshape(-1, p.shape[1])
        drawn = torch.multinomial(flat, samples, replacement=True, generator=generator)
        drawn = drawn.unflatten(0, (p.shape[0], -1)).movedim(2, 1)  # n samples s
        score = p.unsqueeze(1).repeat(1, samples, 1, 1)
        score.scatter_add_(2, drawn.unsqueeze(2), -torch.ones_like(score[:, :, :1]))
        weights = self._weights(outputs, targets)[:, None, None]
        return (score * (weights / samples).sqrt()).flatten(2)

    def _weights(self, outputs: Tensor, targets: Tensor) -> Float[Tensor, "n s"]:
        """The weight of each position in the scalar: the total of its soft target."""
        mass = self._mass(outputs, targets)
        weights = mass / self._divisor(outputs, targets) if self.averages else mass
        return weights.clamp(min=0)  # the PSD part, should a weight be negative

    def _mass(self, outputs: Tensor, targets: Tensor) -> Float[Tensor, "n s"]:
        classes = outputs.shape[1]
        weight = self._class_weight(outputs)
        smoothing = getattr(self.criterion, "label_smoothing", 0.0)
        if targets.is_floating_point():
            soft = targets.reshape(*targets.shape[:2], -1)
            soft = soft * (1 - smoothing) + smoothing / classes
            return torch.einsum("ncs,c->ns", soft, weight)
        kept, index = self._labels(targets)
        return ((1 - smoothing) * weight[index] + smoothing * weight.sum() / classes) * kept

    def _divisor(self, outputs: Tensor, targets: Tensor) -> Tensor | float:
        """What torch's "mean" divides by: the weights of the observed classes."""
        if targets.is_floating_point():
            return outputs.numel() / outputs.shape[1]
        kept, index = self._labels(targets)
        return (self._class_weight(outputs)[index] * kept).sum()

    def _labels(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which positions count, and a valid class index for each."""
        targets = targets.reshape(targets.shape[0], -1)
        kept = targets != self.criterion.ignore_index
        return kept, targets.where(kept, 0)

    def _class_weight(self, outputs: Tensor) -> Tensor:
        weight = self.criterion.weight
        return outputs.new_ones(outputs.shape[1]) if weight is None else weight.to(outputs)


@register_loss(nn.CrossEntropyLoss)
class CrossEntropyGeometry(CategoricalGeometry):
    """Outputs are logits. Label smoothing and soft targets change only the weight w."""


@register_loss(nn.NLLLoss)
class NLLGeometry(CategoricalGeometry):
    """Outputs are log-probabilities, as from ``log_softmax``.

    The loss is linear in them, so its own Hessian is zero. But log_softmax does nothing to
    log-probabilities, so the loss is also the cross-entropy of its inputs, and that is the
    geometry used: behind a ``LogSoftmax`` it gives the curvature of ``CrossEntropyLoss``.
    """

    def check(self, outputs: Tensor, targets: Any) -> None:
        super().check(outputs, targets)
        if targets.is_floating_point():
            raise BatchError("NLLLoss: targets must be class indices.")
        total = outputs.detach().logsumexp(1)
        if not torch.allclose(total, torch.zeros_like(total), atol=1e-3):
            raise BatchError(
                "NLLLoss got outputs that are not log-probabilities: the probabilities of some "
                f"datum add up to {float(total.abs().max().exp()):.4g} or its inverse. End the "
                "model with LogSoftmax(dim=1), or use CrossEntropyLoss on the logits."
            )


def _without_classes(outputs: Tensor) -> torch.Size:
    return torch.Size((outputs.shape[0], *outputs.shape[2:]))
