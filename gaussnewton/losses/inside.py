"""Loss functions that a model calls by itself, as models do that return their loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gaussnewton.errors import RecordError

FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.gaussian_nll_loss: nn.GaussianNLLLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
}
"""What is recognised inside of a model, and the module that means the same."""


@dataclass(frozen=True)
class InnerLoss:
    """One call of a loss function.

    Attributes:
        criterion: the same as a module.
        arguments: what it was called with, as the module takes it.
        value: what it returned, with its graph.
    """

    criterion: nn.Module
    arguments: tuple[Any, ...]
    value: Tensor


class LossWatch(TorchFunctionMode):
    """Notes the loss functions that are called inside.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> from gaussnewton.losses.inside import LossWatch
        >>> with LossWatch() as watch:
        ...     loss = F.mse_loss(torch.zeros(3, 2, requires_grad=True), torch.ones(3, 2))
        >>> watch.found[0].criterion
        MSELoss()
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[InnerLoss] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in FUNCTIONS and (result.requires_grad or not torch.is_grad_enabled()):
            self.found.append(_inner_loss(func, args, kwargs or {}, result))
        return result

    def only(self, model: nn.Module) -> InnerLoss:
        """The one loss that was called."""
        if len(self.found) == 1:
            return self.found[0]
        names = ", ".join(type(inner.criterion).__name__ for inner in self.found) or "none"
        raise RecordError(
            f"without a criterion, {type(model).__name__} must call one loss function of torch in "
            f"each forward pass, and it called {names}. Give the criterion, and with outputs=… "
            "which of the model's outputs it is to see."
        )


def _inner_loss(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor
) -> InnerLoss:
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    kind = FUNCTIONS[func]
    wanted = inspect.signature(kind.forward).parameters
    arguments = tuple(given[name] for name in wanted if name in given)
    options = inspect.signature(kind.__init__).parameters
    settings = {
        name: value
        for name, value in given.items()
        if name in options and name not in ("size_average", "reduce")
    }
    return InnerLoss(kind(**settings), arguments, value)
