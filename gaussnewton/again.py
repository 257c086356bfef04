"""A forward pass that can be run once more, for products with its Jacobian."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.parameters import Theta

Rerun = Callable[[slice, Callable[..., object]], Tensor]
"""What the criterion looks at, of some of the data, by calling something in place of the model."""


class ForwardMode:
    """Whether derivatives by forward mode do for a model: unknown until they were compared once.

    Forward mode carries k tangents through one pass, which costs less than a backward pass with a
    graph of its own and k more through that. But not every operation has a rule for it, or one for
    a batch of tangents; a model may look at its numbers in ways that a transformation forbids; and
    forward mode moves on through a ``torch.no_grad()`` inside of the model, which is then not the
    function that ``backward`` saw.
    """

    def __init__(self) -> None:
        self.trusted = False
        self.refused = False

    def judge(self, moved: Float[Tensor, "k n d"] | None, expected: Float[Tensor, "k n d"]) -> None:
        """Hold a result beside that of two backward passes."""
        self.trusted = moved is not None and _agree(moved, expected)
        self.refused = not self.trusted


def _agree(moved: Tensor, expected: Tensor) -> bool:
    scale = torch.linalg.vector_norm(expected.double())
    error = torch.linalg.vector_norm(moved.double() - expected.double())
    return bool(error <= torch.finfo(expected.dtype).eps ** 0.5 * scale)


@dataclass(frozen=True)
class Again:
    """A pass that can be run once more.

    Attributes:
        model: what was called.
        rerun: runs it on some of the data.
        began: a context in which everything is as it was when the pass began.
        draws: whether random numbers are drawn in it, so that a part of the data is not to be had
            without the others.
        forward_mode: what is known of forward mode.
    """

    model: nn.Module
    rerun: Rerun
    began: Callable[[], AbstractContextManager[None]]
    draws: bool
    forward_mode: ForwardMode

    def outputs(self, part: slice) -> Tensor:
        """What the criterion looks at, of some of the data, with its graph."""
        with self.began(), torch.enable_grad():
            return self.rerun(part, self.model)

    def forward(
        self, directions: Sequence[Mapping[str, Tensor]], part: slice
    ) -> Float[Tensor, "k n d"] | None:
        """How the outputs move with the parameters, by forward mode; None where it fails."""
        named = dict(self.model.named_parameters())
        moving = [key for key in named if any(key in direction for direction in directions)]
        primals = {key: named[key].detach() for key in moving}
        tangents = {
            key: torch.stack(
                [d[key].to(p.dtype) if key in d else torch.zeros_like(p) for d in directions]
            )
            for key, p in primals.items()
        }

        def outputs(parameters: dict[str, Tensor]) -> Tensor:
            # Made in here, because a transformation lets only its own tensors be overwritten.
            buffers = {name: b.clone() for name, b in self.model.named_buffers()}

            def call(*args: object, **kwargs: object) -> object:
                return torch.func.functional_call(self.model, parameters | buffers, args, kwargs)

            return self.rerun(part, call).flatten(1)

        def moved(direction: dict[str, Tensor]) -> Tensor:
            result: Tensor = torch.func.jvp(outputs, (primals,), (direction,))[1]
            return result

        try:
            with self.began(), torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "`torch.jit.script`")  # by torch.func itself
                result: Tensor = torch.func.vmap(moved, randomness="same")(tangents)
        except (RuntimeError, NotImplementedError):  # no rule, or not allowed in a transformation
            return None
        return result


@dataclass(frozen=True)
class Outline:
    """What products with a network's Jacobian need to know of it.

    Attributes:
        theta: the parameters.
        data: rows of the outputs.
        entries: numbers that the recorded calls return, for each of these rows, about.
        apart: whether a part of the data is known to be the same function without the others.
    """

    theta: Theta
    data: int
    entries: int
    apart: bool

    def bytes_of(self, count: int) -> int:
        """About how many bytes some tangents of one row take."""
        sizes = [p.element_size() for group in self.theta for p in group.parameters.values()]
        # What a layer returns is there before and after the function behind it, and moved.
        return 2 * (count + 1) * self.entries * max(4, *sizes)


@dataclass(frozen=True)
class Repeat:
    """A pass that is run once more for products with its Jacobian, and what is known of it."""

    again: Again
    outline: Outline
