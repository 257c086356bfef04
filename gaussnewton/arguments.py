"""What is wrong with an optimiser's arguments, in words."""

from __future__ import annotations

from typing import Any

from torch import nn


def check_arguments(model: Any, criterion: Any, lr: float, weight_decay: float) -> None:
    """Catch the likeliest mistakes where they are made."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the first argument is the model, not {type(model).__name__}: the optimiser watches "
            "its forward passes. Write gn.GaussNewton(model, criterion); parameters or groups may "
            "follow."
        )
    if isinstance(criterion, type):
        raise TypeError(
            f"the criterion is the class {criterion.__name__}; make an instance of it first: "
            f"criterion = {criterion.__name__}()."
        )
    if criterion is not None and not callable(criterion):
        raise TypeError(
            f"the second argument is the criterion, not {type(criterion).__name__}: the loss "
            "module that the loop calls. Parameters or groups come after it."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no parameter to train. The model comes first, then the "
            "criterion."
        )
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
