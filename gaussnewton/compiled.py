"""Models that ``torch.compile`` has been at.

A compiled forward pass is one node of the autograd graph, and hooks of the layers inside it do
not run. What curvature needs of such a pass is had by running it once more, uncompiled.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a part of it is compiled, by ``torch.compile`` or in place.

    Example:
        >>> import torch
        >>> from gaussnewton.compiled import is_compiled
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> is_compiled(model), is_compiled(torch.compile(model, backend="eager"))
        (False, True)
    """
    return any(
        "_orig_mod" in module._modules or module._compiled_call_impl is not None
        for module in model.modules()
    )


def original(model: nn.Module) -> nn.Module:
    """The model that was given to ``torch.compile``, or the model itself."""
    return model._modules.get("_orig_mod") or model


def eagerly(model: nn.Module) -> AbstractContextManager[object]:
    """Inside, the model runs as if it had not been compiled."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext()
