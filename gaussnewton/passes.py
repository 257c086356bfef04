"""A call of the model, and how the criterion's arguments come from what it returned."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gaussnewton.tape import LayerCall

Source = Callable[[Any], Tensor]
"""From what the model returns to an argument of the criterion."""


@dataclass(frozen=True)
class Start:
    """How a forward pass began: what evaluating the same function again needs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: Tensor
    buffers: dict[str, Tensor]
    precision: dict[str, Any]

    def autocast(self) -> torch.autocast:
        """The mixed precision that the pass began in, or none.

        Without autocast's cache, which would outlive a change of the parameters.
        """
        return torch.autocast(**self.precision, cache_enabled=False)


def precision_of(device_type: str) -> dict[str, Any]:
    """The mixed precision of now, as arguments of ``torch.autocast``."""
    return {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
    }


@dataclass
class ForwardPass:
    """A call of the model, until a criterion is called on its outputs.

    Attributes:
        start: how it began.
        calls: its layers' calls.
        outputs: what it returned, held weakly: a pass that nobody looks at is gone.
        versions: how often each of those had been changed in place when it was returned.
        held: the same tensors, until a criterion or the model is called: a loop that reshapes what
            the model returns lets go of it before.
        nodes: where that lies in the graph; only where a user's function is to be found behind it.
        draws: whether random numbers were drawn in it.
    """

    start: Start
    calls: list[LayerCall]
    outputs: list[weakref.ref[Any] | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    nodes: set[Any] = field(default_factory=set)
    draws: bool = False

    def source(self, argument: Any) -> Source | None:
        """How something comes from what the model returned: one of its tensors, or one reshaped."""
        if not isinstance(argument, Tensor):
            return None
        for i, (ref, version) in enumerate(zip(self.outputs, self.versions, strict=True)):
            leaf = ref() if ref else None
            if leaf is not None and leaf._version != version:
                continue  # changed in place since: no longer what the model returned
            if leaf is argument:
                return partial(_leaf, i, None)
            if leaf is not None and _is_reshaped(argument, leaf):
                return partial(_leaf, i, argument.shape[1:])
        return None

    def let_go(self, argument: Any) -> None:
        """Hold what was returned no longer than what was made of it, which may be used again."""
        held, self.held = self.held, []
        if isinstance(argument, Tensor) and not any(leaf is argument for leaf in held):
            argument.__dict__["_returned"] = held or argument.__dict__.get("_returned")

    def is_behind(self, argument: Any) -> bool:
        """Whether something was computed from its outputs."""
        if not isinstance(argument, Tensor) or argument.grad_fn is None:
            return False
        frontier, seen = [argument.grad_fn], set()
        while frontier:
            node = frontier.pop()
            if node in self.nodes:
                return True
            if node not in seen:
                seen.add(node)
                frontier.extend(following for following, _ in node.next_functions if following)
        return False

    @property
    def alive(self) -> bool:
        """Whether any of its outputs is still in use."""
        return bool(self.nodes) or any(ref and ref() is not None for ref in self.outputs)


def _leaf(i: int, shape: torch.Size | None, outputs: Any) -> Tensor:
    """One of the tensors that a model returned, or that with other dimensions."""
    leaf: Tensor = flat(outputs)[i]
    return leaf if shape is None else leaf.reshape(-1, *shape)


def chosen(function: Callable[[Any], Any], i: int, outputs: Any) -> Tensor:
    """What a user's function takes of a model's outputs."""
    chosen = function(outputs)
    return chosen[i] if isinstance(chosen, (tuple, list)) else chosen


def _is_reshaped(tensor: Tensor, source: Tensor) -> bool:
    """Whether a tensor is a source's numbers in their order, with other dimensions."""
    return (
        tensor.requires_grad
        and tensor.numel() == source.numel()
        and tensor.data_ptr() == source.data_ptr()
        and tensor.is_contiguous()
        and source.is_contiguous()
    )


def flat(outputs: Any) -> list[Any]:
    """The tensors that a model returned, in tuples, dicts or dataclasses, one after another.

    Example:
        >>> from gaussnewton.passes import flat
        >>> flat({"a": 1, "b": (2, [3])})
        [1, 2, 3]
    """
    if isinstance(outputs, (tuple, list)):
        return [leaf for part in outputs for leaf in flat(part)]
    if isinstance(outputs, Mapping):
        return [leaf for part in outputs.values() for leaf in flat(part)]
    if is_dataclass(outputs):
        return [leaf for part in fields(outputs) for leaf in flat(getattr(outputs, part.name))]
    return [outputs]
