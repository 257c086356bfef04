"""A stretch of the autograd graph between two or more tensors, and the way back through it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

Place = tuple[Any, int]
"""A tensor of the recorded pass: the node that made it, and which of the node's results it is."""


class Region:
    """A function y = φ(x₁ … x_k), given by the nodes of the graph that lie between.

    Its derivative is taken node by node and stops at the inputs, so that what one input owes to
    another is not counted here. ``torch.autograd.grad`` would go on through it.

    Args:
        output: y.
        inputs: x₁ … x_k.
        nodes: all that lie between, each before those that it depends on.
    """

    def __init__(self, output: Place, inputs: Sequence[Place], nodes: Sequence[Any]) -> None:
        self.output, self.inputs, self.nodes = output, tuple(inputs), tuple(nodes)

    @property
    def names(self) -> list[str]:
        """What the nodes are called."""
        return [node.name() for node in self.nodes]

    @property
    def repeats(self) -> bool:
        """Whether an input is used more than once."""
        used = [place for node in self.nodes for place in node.next_functions]
        return any(used.count(place) > 1 for place in self.inputs)

    def pull(self, v: Tensor, cast: bool = True) -> list[Tensor]:
        """Jᵢᵀ v for each input, v being shaped as y."""
        pending: dict[Any, dict[int, Tensor]] = {self.output[0]: {self.output[1]: v}}
        found: dict[Place, Tensor] = {}
        for node in self.nodes:
            given = pending.pop(node, None)
            if given is None:
                continue
            for place, gradient in zip(node.next_functions, _backward(node, given), strict=True):
                if gradient is None or place[0] is None:
                    continue
                if place in self.inputs:
                    g = _fitted(gradient, place, cast)
                    found[place] = found[place] + g if place in found else g
                elif place[0] in self.nodes:
                    g = _fitted(gradient, place, cast)
                    inner = pending.setdefault(place[0], {})
                    inner[place[1]] = inner[place[1]] + g if place[1] in inner else g
        return [found.get(p, v.new_zeros(shape_of(p))) for p in self.inputs]

    def pull_rows(self, rows: Float[Tensor, "r n *y"]) -> list[Tensor]:
        """The same for r vectors of each datum at once."""
        with torch.no_grad(), warnings.catch_warnings():
            # Some backwards, as that of attention, are done row by row all the same.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            try:
                return list(torch.func.vmap(lambda v: tuple(self.pull(v)))(rows))
            except (RuntimeError, NotImplementedError, ValueError):  # cannot be batched
                each = [self.pull(v) for v in rows]
                return [torch.stack(parts) for parts in zip(*each, strict=True)]


def shape_of(place: Place) -> torch.Size:
    """The shape of a tensor of the pass."""
    return torch.Size(place[0]._input_metadata[place[1]].shape)


def dtype_of(place: Place) -> torch.dtype:
    """The dtype of a tensor of the pass."""
    dtype: torch.dtype = place[0]._input_metadata[place[1]].dtype
    return dtype


def like(place: Place, *lead: int) -> Tensor:
    """An empty tensor, shaped as a tensor of the pass behind some other axes."""
    metadata = place[0]._input_metadata[place[1]]
    return torch.empty(*lead, *metadata.shape, dtype=metadata.dtype, device=metadata.device)


def _backward(node: Any, given: dict[int, Tensor]) -> Sequence[Tensor | None]:
    arguments = [given.get(i) for i in range(len(node._input_metadata))]
    # Functions written in Python are not callable, but have this method.
    result = node(*arguments) if callable(node) else node.apply(*arguments)
    return result if isinstance(result, tuple) else (result,)


def _fitted(gradient: Tensor, place: Place, cast: bool) -> Tensor:
    """As autograd's engine does between nodes: what was broadcast is summed."""
    shape = shape_of(place)
    gradient = gradient if gradient.shape == shape else gradient.sum_to_size(shape)
    return gradient.to(dtype_of(place)) if cast else gradient
