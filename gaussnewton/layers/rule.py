"""What every layer type tells the curvature, and which module has which rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.gram import gram
from gaussnewton.perdatum import PerDatum


class LayerRule(ABC):  # noqa: B024
    """The meaning of one layer type: of one of the kinds below."""

    def fits(self, module: Any) -> bool:  # noqa: ARG002
        """Whether the module is an ordinary one of its type, e.g. not reparametrised."""
        return True


class SmallRule(LayerRule):
    """A layer with so few parameters that its block may be written out, or its diagonal."""

    @abstractmethod
    def parameter_rows(
        self, module: Any, input: Tensor, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "k n size"]:
        """What gradients at the outputs pull on the trained parameters, datum by datum.

        In the order of ``module.parameters()``.
        """


class TableRule(LayerRule):
    """A table of vectors, of which each position of a datum takes one."""

    @abstractmethod
    def uses(self, module: Any, input: Tensor) -> Float[Tensor, " rows"]:
        """How often each row is taken, as a share of all positions."""

    @abstractmethod
    def gradients(
        self, module: Any, input: Tensor, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "k n r columns"]:
        """Gradients at the vectors taken, by positions."""


class MatrixRule(LayerRule):
    """A matrix ``[W | b]`` that multiplies vectors a: its block is a Kronecker product.

    A layer may use its matrix at several positions of one datum: a convolution at every pixel, a
    linear layer at every step of a sequence. It may be several matrices side by side, as a
    convolution with groups is; each then has rows of its own.
    """

    @abstractmethod
    def positions(self, module: Any, input: Tensor) -> Float[Tensor, "n r groups columns"]:
        """The vectors a that the matrix multiplies, at r positions of each datum.

        Only the columns that are trained: 1 for the bias if there is one, and none of the
        inputs if the weight is frozen.
        """

    @abstractmethod
    def gradients(
        self, module: Any, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "k n r groups out"]:
        """Gradients at the layer's outputs, sorted by the same positions and groups."""

    def second_moment(
        self, module: Any, input: Tensor
    ) -> tuple[Float[Tensor, "groups columns columns"], int]:
        """Σ a aᵀ over data and positions, and how many they are.

        A layer that can have it without writing out its positions should.
        """
        a = self.positions(module, input).flatten(0, 1)
        return torch.stack([gram(a[:, group]) for group in range(a.shape[1])]), len(a)

    def gradient_moment(
        self, module: Any, rows: Float[Tensor, "k n *out"]
    ) -> Float[Tensor, "groups out out"]:
        """Σ g gᵀ over vectors, data and positions."""
        g = self.gradients(module, rows).flatten(0, 2)
        return torch.stack([gram(g[:, group]) for group in range(g.shape[1])])

    def moment_entries(self, module: Any, input: Tensor) -> int:
        """About how many numbers :meth:`second_moment` writes for each datum on its way."""
        return self.positions(module, input[:1]).numel()


class ChainRule(MatrixRule):
    """A layer that multiplies each datum by its matrix once, so that matrices go back through it.

    Such layers form the chains of eq. nn, on which the recursions of the paper run.
    """

    @abstractmethod
    def objection(self, input: Tensor) -> str | None:
        """Why a call on this input is not of that kind, or None."""

    @abstractmethod
    def rows(self, module: Any, input: Tensor) -> Float[Tensor, "n columns"]:
        """The one vector a_n of each datum."""

    @abstractmethod
    def input_moment(self, module: Any, input: Tensor) -> Float[Tensor, "columns columns"]:
        """Q: the average of a aᵀ over data (eq. q2)."""

    @abstractmethod
    def pull(self, module: Any, matrices: PerDatum) -> PerDatum:
        """Wᵀ M_n W for each datum."""

    @abstractmethod
    def pull_expected(self, module: Any, G: Float[Tensor, "out out"]) -> Float[Tensor, "in in"]:
        """Wᵀ G W for one matrix."""

    @abstractmethod
    def pull_rows(self, module: Any, rows: Tensor) -> Tensor:
        """Vectors at the outputs, times W: gradients at the inputs."""

    @abstractmethod
    def push(
        self, module: Any, direction: Float[Tensor, "k rows columns"], input: Tensor
    ) -> Float[Tensor, "k n rows"]:
        """V a: how the outputs move when the matrix ``[W | b]`` moves along V."""

    @abstractmethod
    def push_rows(self, module: Any, rows: Float[Tensor, "k n d"]) -> Float[Tensor, "k n e"]:
        """W r: tangents at the inputs, carried to the outputs."""


_RULES: dict[type[nn.Module], LayerRule] = {}


def register_layer(module: type[nn.Module]) -> Callable[[type[LayerRule]], type[LayerRule]]:
    """Class decorator: this rule speaks for modules of that type."""

    def add(rule: type[LayerRule]) -> type[LayerRule]:
        _RULES[module] = rule()
        return rule

    return add


def rule_for(module: nn.Module) -> LayerRule | None:
    """The rule of a module's type; of a base type if the forward is the same; or None."""
    for base in type(module).__mro__:
        if base in _RULES:
            plain = type(module).forward is base.forward and "forward" not in vars(module)
            return _RULES[base] if plain and _RULES[base].fits(module) else None
    return None


def supported_layers() -> list[str]:
    """The names of the layer types that have a rule."""
    return sorted(module.__name__ for module in _RULES)
