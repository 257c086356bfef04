"""What a batch is, and how model and criterion are called on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from gaussnewton.errors import BatchError

Batch = tuple[Any, Any]
"""``(inputs, targets)``: inputs a tensor, a tuple of arguments or a dict of keyword arguments;
targets a tensor, or a tuple where the criterion takes several."""


def batches_in(data: Any) -> Iterable[Batch]:
    """The batches of an iterable.

    A tuple is one batch; so is a pair in a list, as a ``DataLoader`` gives it, if either half
    is a tensor.
    """
    if isinstance(data, tuple) or _is_listed_batch(data):
        return [as_batch(data)]
    if isinstance(data, Tensor) or not isinstance(data, Iterable):
        raise BatchError(
            f"data are {type(data).__name__}; give one batch as a tuple (inputs, targets), or an "
            "iterable of such tuples, e.g. a DataLoader."
        )
    return (as_batch(item) for item in data)


def as_batch(item: Any) -> Batch:
    """The pair (inputs, targets), lists in it as tuples."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        found = f"{len(item)} parts" if isinstance(item, (tuple, list)) else type(item).__name__
        raise BatchError(
            f"a batch is a pair (inputs, targets), not {found}. Several inputs go in a tuple or a "
            "dict inside that pair, several batches in a list."
        )
    inputs, targets = (_usable(part) for part in item)
    return inputs, targets


def call_model(model: nn.Module, batch: Batch) -> Any:
    """``model(inputs)``, a tuple being arguments and a mapping keyword arguments."""
    inputs = batch[0]
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if not isinstance(inputs, tuple):
        return model(inputs)
    try:
        inspect.signature(model.forward).bind(*inputs)
    except TypeError as error:
        raise BatchError(
            f"{type(model).__name__} cannot be called with {len(inputs)} inputs ({error}). A tuple "
            "is one batch (inputs, targets), and a tuple of inputs is several arguments; several "
            "batches go in a list."
        ) from error
    return model(*inputs)


def call_criterion(criterion: Callable[..., Tensor], outputs: Any, batch: Batch) -> Tensor:
    """``criterion(outputs, targets)``, a tuple of targets being several arguments.

    A model that predicts a variance beside the mean returns both; ``nn.GaussianNLLLoss``
    wants the targets between them.
    """
    targets = batch[1] if isinstance(batch[1], tuple) else (batch[1],)
    if isinstance(criterion, nn.GaussianNLLLoss) and isinstance(outputs, (tuple, list)):
        mean, var = outputs
        return criterion(mean, *targets, var)
    if isinstance(outputs, (tuple, list)) and getattr(criterion, "outputs", 1) == len(outputs):
        return criterion(*outputs, *targets)
    return criterion(outputs, *targets)


def _is_listed_batch(data: Any) -> bool:
    if not isinstance(data, list) or len(data) != 2:
        return False
    return any(isinstance(part, Tensor) for part in data)


def _usable(part: Any) -> Any:
    """Lists as tuples, and copies of tensors that inference mode made unfit for autograd."""
    if isinstance(part, (tuple, list)):
        return tuple(_usable(p) for p in part)
    if isinstance(part, Mapping):
        return {key: _usable(value) for key, value in part.items()}
    return part.clone() if isinstance(part, Tensor) and part.is_inference() else part
