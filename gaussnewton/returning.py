"""A model that returns, for a while, only what its criterion looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gaussnewton.compiled import original


@contextmanager
def returning(model: nn.Module, outputs: Callable[[Any], Any] | None) -> Iterator[None]:
    """Inside, calls of the model return ``outputs(…)`` of what it returns; None changes nothing.

    Args:
        model: any model.
        outputs: as for :func:`~gaussnewton.curvature`.

    Example:
        >>> import torch
        >>> from gaussnewton.returning import returning
        >>> model = torch.nn.Linear(2, 1)
        >>> with returning(model, lambda y: {"logits": y}):
        ...     sorted(model(torch.ones(3, 2)))
        ['logits']
        >>> model(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """
    if outputs is None:
        yield
        return
    handle = original(model).register_forward_hook(lambda _module, _args, result: outputs(result))
    try:
        yield
    finally:
        handle.remove()
