"""Running means of gradients, of which directions are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.parameters import Group
from gaussnewton.precision import widened


def smooth(
    state: dict[str, Any], group: Group, fresh: Mapping[str, Tensor], t: int, memory: float
) -> None:
    """ḡ ← β ḡ + (1 − β) ∇f with β at most 1 − 1/t, of parameters that had a part in this pass.

    Args:
        state: a layer's state, where ḡ is kept as ``gradient``, a matrix ``[W | b]``.
        group: the layer's parameters.
        fresh: ∇f of those that have one, by name.
        t: the number of this update.
        memory: β.

    Example:
        >>> import torch
        >>> from gaussnewton import Theta
        >>> from gaussnewton.smoothing import smooth
        >>> (group,), state = Theta(torch.nn.Linear(2, 1)), {}
        >>> for t in (1, 2):
        ...     fresh = {"weight": torch.full((1, 2), 1.0 - t), "bias": torch.ones(1)}
        ...     smooth(state, group, fresh, t, memory=0.75)
        >>> state["gradient"]
        tensor([[-0.5000, -0.5000,  1.0000]])
    """
    like = widened(next(iter(group.parameters.values())).detach())
    mean = state.get("gradient")
    if mean is None or mean.shape != (group.rows, group.columns):
        mean = state["gradient"] = like.new_zeros(group.rows, group.columns)
        t = 1
    beta = min(memory, 1 - 1 / t)
    for key, part in group.parts(mean).items():
        if key in fresh:
            part.lerp_(fresh[key].reshape(part.shape).to(part.dtype), 1 - beta)


def smoothed(state: dict[str, Any], group: Group) -> Float[Tensor, "rows columns"]:
    """ḡ of a layer; zero for parameters that had no part in this pass."""
    mean: Tensor = state["gradient"]
    took_part = [p.grad is not None for p in group.parameters.values()]
    if all(took_part):
        return mean
    parts = group.parts(mean).values()
    return torch.cat([part * yes for part, yes in zip(parts, took_part, strict=True)], dim=1)
