"""One forward pass on a batch, and the scalar that the criterion makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.batch import as_batch, call_model
from gaussnewton.errors import BatchError, UnsupportedLossError
from gaussnewton.parameters import Theta

Criterion = Callable[..., Tensor]
"""Called as ``criterion(outputs, targets)``; targets that are a tuple are spread."""


@dataclass(frozen=True)
class Evaluation:
    """One forward pass: the layout of θ, the outputs with their graph, and the targets."""

    theta: Theta
    outputs: Float[Tensor, "n ..."]
    targets: Any


def evaluate(model: nn.Module, criterion: Criterion, batch: Sequence[Any]) -> Evaluation:
    """Run the model on a batch, with its graph. To be called inside ``unchanged(model)``."""
    pair = as_batch(batch)
    outputs = one_tensor(criterion, call_model(model, pair))
    return Evaluation(Theta(model), outputs, pair[1])


def one_tensor(criterion: Criterion, outputs: Any) -> Float[Tensor, "n ..."]:
    """The model's outputs as one tensor whose first dimension is the data.

    A pair (mean, variance) for :class:`torch.nn.GaussianNLLLoss` is stacked along dimension 1.
    """
    if isinstance(criterion, nn.GaussianNLLLoss) and isinstance(outputs, tuple | list):
        mean, variance = outputs
        if variance.shape == mean.shape[:-1]:  # torch reads this as one variance a row
            variance = variance.unsqueeze(-1)
        outputs = torch.stack([mean, variance.expand_as(mean)], dim=1)
    return _checked(outputs)


def _checked(outputs: Any) -> Float[Tensor, "n ..."]:
    if not isinstance(outputs, Tensor):
        raise BatchError(
            f"the model returned {type(outputs).__name__}; curvature needs one tensor of outputs "
            "(or a pair (mean, variance) with nn.GaussianNLLLoss). Give outputs=, a function that "
            "takes the tensor which the criterion looks at out of it, where there is such an "
            "argument; or wrap the model in a module that returns that tensor."
        )
    if outputs.ndim == 0 or outputs.shape[0] == 0 or outputs.numel() == 0:
        raise BatchError(
            f"outputs of shape {tuple(outputs.shape)} hold no data; the first dimension counts "
            "the data and must not be zero"
        )
    return outputs


def predicts_variance(criterion: Criterion, targets: Any) -> bool:
    """Whether the outputs are a stacked (mean, variance), rather than the mean alone."""
    return isinstance(criterion, nn.GaussianNLLLoss) and not isinstance(targets, tuple)


def loss(criterion: Criterion, outputs: Float[Tensor, "n ..."], targets: Any) -> Float[Tensor, ""]:
    """The scalar E whose curvature is meant: what the criterion returns, summed if need be."""
    if predicts_variance(criterion, targets):
        mean, variance = outputs.unbind(1)
        value = criterion(mean, targets, variance)
    elif isinstance(targets, tuple):
        value = criterion(outputs, *targets)
    else:
        value = criterion(outputs, targets)
    if not value.requires_grad:
        raise UnsupportedLossError(
            "the criterion's result does not depend on the outputs in a way that autograd can "
            "follow; it must be computed from them by differentiable torch operations"
        )
    return value.sum()
