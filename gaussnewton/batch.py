"""What a batch is, and how model and criterion are called on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from gaussnewton.errors import BatchError

Batch = tuple[Any, Any]
"""``(inputs, targets)``."""


def batches_in(data: Any) -> Iterable[Batch]:
    """The batches of an iterable; a tuple, or a list that opens with a tensor, is one batch."""
    is_list_batch = isinstance(data, list) and len(data) == 2 and isinstance(data[0], Tensor)
    if isinstance(data, tuple) or is_list_batch:
        return [_as_batch(data)]
    if isinstance(data, Tensor) or not isinstance(data, Iterable):
        raise BatchError(
            f"data are {type(data).__name__}; give one batch as a tuple (inputs, targets), or an "
            "iterable of such tuples, e.g. a DataLoader."
        )
    return (_as_batch(item) for item in data)


def call_model(model: nn.Module, batch: Batch) -> Any:
    """``model(inputs)``, a tuple being arguments and a dict keyword arguments."""
    inputs = batch[0]
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def call_criterion(criterion: Callable[..., Tensor], outputs: Any, batch: Batch) -> Tensor:
    """``criterion(outputs, targets)``, a tuple of targets being several arguments.

    A model that predicts a variance beside the mean returns both; ``nn.GaussianNLLLoss``
    wants the targets between them.
    """
    targets = batch[1] if isinstance(batch[1], tuple) else (batch[1],)
    if isinstance(criterion, nn.GaussianNLLLoss) and isinstance(outputs, tuple):
        mean, var = outputs
        return criterion(mean, *targets, var)
    return criterion(outputs, *targets)


def _as_batch(item: Any) -> Batch:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        found = f"{len(item)} parts" if isinstance(item, (tuple, list)) else type(item).__name__
        raise BatchError(f"a batch is a pair (inputs, targets), not {found}.")
    return item[0], item[1]
