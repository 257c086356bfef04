"""What lies between two layers: the function from h_λ to a_λ, and the way back through it.

Found in the autograd graph, so it does not matter how it was written: a module, a
functional call, a method, a lambda, dropout, a reshape, or several of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gaussnewton.activations import REORDERS_NOTHING, RULES, Activation
from gaussnewton.errors import UnsupportedGraphError
from gaussnewton.perdatum import PerDatum, Roots
from gaussnewton.perdatum.dense import psd_root
from gaussnewton.precision import widened
from gaussnewton.probe import (
    datum_matrices,
    diagonal_of,
    keeps_data_apart,
    refuse_single_differentiation,
)
from gaussnewton.tiles import each_tile, tiled_gram, untiled

# How many numbers a general segment carries back at a time.
_AT_ONCE = 2**24


class Segment(ABC):
    """The function between two layers, a = f(h), with Jacobian J_n at datum n."""

    @abstractmethod
    def pull(self, matrices: PerDatum, part: slice) -> PerDatum:
        """J_nᵀ M_n J_n for the data of a part of the batch."""

    @abstractmethod
    def pull_expected(
        self, G: Float[Tensor, "e b"], largest: int | None = None
    ) -> Float[Tensor, "d c"]:
        """E[J_nᵀ G J_n], the step of KFRA (section 3.5); G and the result in tiles of a limit."""

    @abstractmethod
    def pull_rows(self, rows: Float[Tensor, "n e"]) -> Float[Tensor, "n d"]:
        """J_nᵀ r_n: a gradient on its way back."""

    @abstractmethod
    def push(self, rows: Float[Tensor, "k n d"], part: slice) -> Float[Tensor, "k n e"]:
        """J_n r_n: k tangents of each datum of a part of the batch on their way forward.

        They may be overwritten.
        """

    @abstractmethod
    def pull_hessian(
        self, H: Float[Tensor, "n e e"], gradient: Float[Tensor, "n e"]
    ) -> Float[Tensor, "n d d"]:
        """J_nᵀ H_n J_n + Σ_i (∂E/∂a_i) ∇²a_i, the step of eq. hess:recursion."""


class Identity(Segment):
    """Nothing lies between, or nothing but a change of shape."""

    def pull(self, matrices: PerDatum, part: slice) -> PerDatum:
        del part
        return matrices

    def pull_expected(
        self, G: Float[Tensor, "e b"], largest: int | None = None
    ) -> Float[Tensor, "d c"]:
        del largest
        return G

    def pull_rows(self, rows: Float[Tensor, "n e"]) -> Float[Tensor, "n d"]:
        return rows

    def push(self, rows: Float[Tensor, "k n d"], part: slice) -> Float[Tensor, "k n e"]:
        del part
        return rows

    def pull_hessian(
        self, H: Float[Tensor, "n e e"], gradient: Float[Tensor, "n e"]
    ) -> Float[Tensor, "n d d"]:
        del gradient
        return H


class Elementwise(Segment):
    """Entry by entry: J = B = diag(f'(h)), and the Hessian gains D = diag(f''(h) ∂E/∂a)."""

    def __init__(self, slope: Tensor, path: Path) -> None:
        self.slope: Float[Tensor, "n d"] = widened(slope.flatten(1))
        self.path = path

    def bend(self, gradient: Float[Tensor, "n e"]) -> Tensor:
        """D of each datum: ``[n, d]`` where it is diagonal.

        A function that is elementwise only at this point has a full D, ``[n, d, d]``.
        """
        return self.path.second_derivative(gradient)

    def pull(self, matrices: PerDatum, part: slice) -> PerDatum:
        return matrices.scale(self.slope[part])

    def pull_expected(
        self, G: Float[Tensor, "e b"], largest: int | None = None
    ) -> Float[Tensor, "d c"]:
        slope = self.slope
        return tiled_gram(slope, largest, 1 / slope.shape[0]).mul_(G)

    def pull_rows(self, rows: Float[Tensor, "n e"]) -> Float[Tensor, "n d"]:
        return rows * self.slope

    def push(self, rows: Float[Tensor, "k n d"], part: slice) -> Float[Tensor, "k n e"]:
        return rows * self.slope[part]

    def pull_hessian(
        self, H: Float[Tensor, "n e e"], gradient: Float[Tensor, "n e"]
    ) -> Float[Tensor, "n d d"]:
        B, D = self.slope, widened(self.bend(gradient))
        return B.unsqueeze(2) * H * B.unsqueeze(1) + (D.diag_embed() if D.ndim == 2 else D)


class Known(Elementwise):
    """An elementwise function with rules for its derivatives."""

    def __init__(self, activation: Activation, data: int) -> None:
        self.activation = activation
        self.saved = activation.saved.reshape(data, -1)

    @property
    def slope(self) -> Float[Tensor, "n d"]:  # type: ignore[override]
        """f'(h)."""
        return widened(self.activation.slope(self.saved))

    def bend(self, gradient: Float[Tensor, "n e"]) -> Float[Tensor, "n d"]:
        return widened(self.activation.bend(self.saved)) * gradient

    def pull(self, matrices: PerDatum, part: slice) -> PerDatum:
        if isinstance(matrices, Roots) and matrices.rows.dtype == self.saved.dtype:
            rows, saved = matrices.rows, self.saved[part].unsqueeze(1)
            return Roots(self.activation.backward(rows, saved.expand_as(rows), rows))
        return super().pull(matrices, part)

    # Slopes are not kept: those of all layers are as many numbers as the activations.

    def pull_rows(self, rows: Float[Tensor, "n e"]) -> Float[Tensor, "n d"]:
        if rows.dtype != self.saved.dtype:
            return super().pull_rows(rows)
        return self.activation.backward(rows, self.saved, torch.empty_like(rows))

    def push(self, rows: Float[Tensor, "k n d"], part: slice) -> Float[Tensor, "k n e"]:
        if rows.dtype != self.saved.dtype:
            return super().push(rows, part)
        return self.activation.backward(rows, self.saved[part].expand_as(rows), rows)


class General(Segment):
    """Any other function that treats each datum by itself: softmax, a permutation, …

    Its Jacobian is never formed; rows go back through autograd's own graph.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def pull(self, matrices: PerDatum, part: slice) -> PerDatum:
        def pullback(rows: Float[Tensor, "k n e"]) -> Float[Tensor, "k n d"]:
            # The graph knows only the whole batch: data outside the part get zeros.
            whole = rows.new_zeros(rows.shape[0], self.path.data, rows.shape[2])
            whole[:, part] = rows
            return self.path.pull(whole)[:, part]

        return matrices.pull_through(pullback)

    def pull_expected(
        self, G: Float[Tensor, "e b"], largest: int | None = None
    ) -> Float[Tensor, "d c"]:
        n = self.path.data
        total: Tensor | float = 0.0
        R = each_tile(psd_root, G)  # each row lies in one tile, and goes back as a whole
        for rows in untiled(R).split(max(1, _AT_ONCE // (n * G.shape[0]))):
            back = self.path.pull(rows.unsqueeze(1).expand(-1, n, -1))
            total = total + tiled_gram(back.flatten(0, 1), largest, 1 / n)
        assert isinstance(total, Tensor)
        return total

    def pull_rows(self, rows: Float[Tensor, "n e"]) -> Float[Tensor, "n d"]:
        return self.path.pull(rows.unsqueeze(0)).squeeze(0)

    def push(self, rows: Float[Tensor, "k n d"], part: slice) -> Float[Tensor, "k n e"]:
        whole = rows.new_zeros(rows.shape[0], self.path.data, rows.shape[2])
        whole[:, part] = rows
        return self.path.push(whole)[:, part]

    def pull_hessian(
        self, H: Float[Tensor, "n e e"], gradient: Float[Tensor, "n e"]
    ) -> Float[Tensor, "n d d"]:
        half = self.path.pull(H.transpose(0, 1)).movedim(0, 1)  # n e d
        both = self.path.pull(half.movedim(2, 0))  # d n d
        D = widened(self.path.second_derivative(gradient))
        return both.movedim(0, 1) + (D.diag_embed() if D.ndim == 2 else D)


@dataclass(frozen=True)
class Path:
    """A stretch of the autograd graph, from the input of a layer to the output of another."""

    end: GradientEdge
    start: GradientEdge
    like: Tensor  # shape, dtype and device at the end
    nodes: Sequence[Any]

    @property
    def data(self) -> int:
        """How many data there are."""
        return self.like.shape[0]

    def vjp(self, v: Tensor, create_graph: bool = False) -> Tensor:
        """Jᵀ v, for v shaped as the end of the path."""
        with torch.enable_grad():
            (result,) = torch.autograd.grad(
                [self.end], [self.start], [v], retain_graph=True, create_graph=create_graph
            )
        return result

    def pull(self, rows: Float[Tensor, "k n e"]) -> Float[Tensor, "k n d"]:
        """Jᵀ v for k rows of each datum at once."""
        v = rows.to(self.like.dtype).reshape(rows.shape[0], *self.like.shape)
        try:
            (result,) = torch.autograd.grad(
                [self.end], [self.start], [v], retain_graph=True, is_grads_batched=True
            )
        except RuntimeError:  # a backward that cannot be batched, e.g. one that branches
            result = torch.stack([self.vjp(row) for row in v])
        return widened(result.flatten(2))

    def push(self, rows: Float[Tensor, "k n d"]) -> Float[Tensor, "k n e"]:
        """J v for k tangents of each datum, as the derivative of u ↦ Jᵀu, which is linear."""
        with torch.enable_grad():
            u = torch.zeros_like(self.like, requires_grad=True)
            back = self.vjp(u, create_graph=True)
        v = rows.to(back.dtype).reshape(rows.shape[0], *back.shape)
        (result,) = torch.autograd.grad(back, u, v, retain_graph=True, is_grads_batched=True)
        return widened(result.flatten(2))

    def second_derivative(self, v: Float[Tensor, "n e"]) -> Tensor:
        """Σ_i v_i ∇²a_i of each datum: ``[n, d, d]``, or ``[n, d]`` where it is diagonal."""
        # A v that is itself differentiable makes a cut in the graph of g visible.
        v = v.to(self.like.dtype).reshape(self.like.shape).requires_grad_()
        g = self.vjp(v, create_graph=True)
        refuse_single_differentiation(g)

        def product(u: Tensor) -> Tensor:
            (result,) = torch.autograd.grad(
                [g], [self.start], [u], retain_graph=True, allow_unused=True
            )
            return torch.zeros_like(g) if result is None else result  # None: g is linear

        diagonal = diagonal_of(product, g.detach())
        return datum_matrices(product, g.detach()) if diagonal is None else diagonal.flatten(1)


def segment_of(path: Path, between: str) -> Segment:
    """Find out what a path is; ``between`` names its ends for an error."""
    names = [node.name() for node in path.nodes]
    if all(name in REORDERS_NOTHING for name in names):
        return Identity()
    known = [node for node in path.nodes if node.name() in RULES]
    if len(known) == 1 and all(name in REORDERS_NOTHING or name in RULES for name in names):
        return Known(RULES[known[0].name()](known[0]), path.data)
    diagonal = diagonal_of(path.vjp, path.like)
    if diagonal is not None:
        return Elementwise(diagonal, path)
    if not keeps_data_apart(path.vjp, path.like):
        raise UnsupportedGraphError(
            f"what lies between {between} ({', '.join(dict.fromkeys(names))}) mixes the data of "
            "a batch, as batch normalisation in training mode does. The curvature of one datum "
            "is not defined there: call model.eval() first, or take it out."
        )
    return General(path)
