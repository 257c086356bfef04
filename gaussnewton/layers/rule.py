"""What every layer type tells the curvature, and which module has which rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.perdatum import PerDatum
from gaussnewton.tiles import tiled_gram


class LayerRule(ABC):  # noqa: B024
    """The meaning of one layer type: of one of the kinds below."""

    def fits(self, module: Any) -> bool:  # noqa: ARG002
        """Whether the module is an ordinary one of its type, e.g. not reparametrised."""
        return True

    def accepts(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ARG002
        """Whether it speaks for a call with these arguments."""
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

    Attributes:
        transposed: whether the parameter holds the transposed matrix: its rows then belong to the
            vectors a, and its columns to the outputs.
    """

    transposed: ClassVar[bool] = False

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

    def columns(self, module: Any, input: Tensor) -> int:
        """How wide the vectors are that one matrix multiplies: nothing of them is computed."""
        return self.positions(module, torch.empty_like(input, device="meta")).shape[-1]

    def second_moment(
        self, module: Any, input: Tensor, largest: int | None = None
    ) -> tuple[Float[Tensor, "groups columns b"], int]:
        """Σ a aᵀ over data and positions, in tiles of a limit, and how many they are.

        A layer that can have it without writing out its positions should.
        """
        a = self.positions(module, input).flatten(0, 1)
        each = [tiled_gram(a[:, group], largest) for group in range(a.shape[1])]
        return torch.stack(each), len(a)

    def gradient_moment(
        self, module: Any, rows: Float[Tensor, "k n *out"], largest: int | None = None
    ) -> Float[Tensor, "groups out b"]:
        """Σ g gᵀ over vectors, data and positions, in tiles of a limit."""
        g = self.gradients(module, rows).flatten(0, 2)
        return torch.stack([tiled_gram(g[:, group], largest) for group in range(g.shape[1])])

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
    def input_moment(
        self, module: Any, input: Tensor, largest: int | None = None
    ) -> Float[Tensor, "columns b"]:
        """Q: the average of a aᵀ over data (eq. q2), in tiles of a limit."""

    @abstractmethod
    def pull(self, module: Any, matrices: PerDatum) -> PerDatum:
        """Wᵀ M_n W for each datum."""

    @abstractmethod
    def pull_expected(
        self, module: Any, G: Float[Tensor, "out b"], largest: int | None = None
    ) -> Float[Tensor, "in c"]:
        """Wᵀ G W for one matrix, which may be tiled; of the result, the tiles of a limit."""

    @abstractmethod
    def pull_rows(self, module: Any, rows: Tensor) -> Tensor:
        """Vectors at the outputs, times W: gradients at the inputs."""

    @abstractmethod
    def push(
        self, module: Any, direction: Float[Tensor, "k rows columns"], input: Tensor
    ) -> Float[Tensor, "k n rows"]:
        """V a: how the outputs move when the matrix ``[W | b]`` moves along V."""

    @abstractmethod
    def push_rows(
        self,
        module: Any,
        rows: Float[Tensor, "k n d"],
        beside: Float[Tensor, "k n e"] | None = None,
    ) -> Float[Tensor, "k n e"]:
        """W r: tangents at the inputs, carried to the outputs; added to others beside them.

        Those may be overwritten.
        """


_RULES: dict[tuple[type[nn.Module], str], LayerRule] = {}


def register_layer(
    module: type[nn.Module], part: str = ""
) -> Callable[[type[LayerRule]], type[LayerRule]]:
    """Class decorator: this rule speaks for modules of that type.

    Args:
        module: the type.
        part: where a module's parameters do not form one matrix, the parameter that the rule is
            about.
    """

    def add(rule: type[LayerRule]) -> type[LayerRule]:
        _RULES[module, part] = rule()
        return rule

    return add


def rule_for(module: nn.Module, part: str = "") -> LayerRule | None:
    """The rule of a module's type, or of a base type if the forward is the same; or None.

    Args:
        module: the layer.
        part: the name of the first of the parameters that are meant; it matters only where they
            do not form one matrix.
    """
    for base in type(module).__mro__:
        rule = _RULES.get((base, "")) or _RULES.get((base, part))
        if rule is not None:
            own = "forward" in vars(module)
            plain = type(module).forward is getattr(base, "forward", None) and not own
            return rule if plain and rule.fits(module) else None
    return None
