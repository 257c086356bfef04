"""The blocks of all layers together: a block-diagonal matrix that acts on θ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.blocks.base import Block, Inversion
from gaussnewton.blocks.dense import DenseBlock
from gaussnewton.blocks.diagonal import DiagonalBlock
from gaussnewton.blocks.eigen import EigenBlock
from gaussnewton.blocks.grouped import GroupedBlock
from gaussnewton.blocks.joining import ZeroBlock, averaged, merged
from gaussnewton.blocks.kronecker import KroneckerBlock
from gaussnewton.blocks.scaled import ScaledBlock
from gaussnewton.blocks.tiled import TiledBlock
from gaussnewton.parameters import Theta


class Curvature(Mapping[str, Block]):
    """One block for each layer, by the layer's qualified name, and what they do to θ.

    Vectors may be flat, in the order of :class:`~gaussnewton.Theta`, or a mapping from
    parameter names to tensors, such as gradients; the answer has the same form.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model, criterion = torch.nn.Linear(3, 2), torch.nn.MSELoss()
        >>> x, y = torch.randn(9, 3), torch.randn(9, 2)
        >>> criterion(model(x), y).backward()
        >>> c = gn.curvature(model, criterion, (x, y))
        >>> gradient = {name: p.grad for name, p in model.named_parameters()}
        >>> step = c.solve(gradient, damping=1e-3)
        >>> step["weight"].shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        theta: Theta,
        *,
        data: int,
        weight: float | None = None,
    ) -> None:
        self.blocks, self.theta = dict(blocks), theta
        self.data, self.weight = data, weight

    def __repr__(self) -> str:
        return f"Curvature({len(self)} blocks, {self.theta.size} parameters, {self.data} data)"

    def __getitem__(self, name: str) -> Block:
        if name not in self.blocks:
            known = ", ".join(repr(key) for key in self.blocks)
            raise KeyError(f"no block is called {name!r}; there are {known}")
        return self.blocks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __matmul__(self, v: Any) -> Any:
        """The product with a vector."""
        return self._apply(v, lambda block, V: block @ V)

    def solve(self, v: Any, damping: float, inversion: Inversion = "exact") -> Any:
        """(C + damping · I)⁻¹ v.

        Args:
            v: a vector, e.g. the gradient.
            damping: k = γ + η of appendix B.1.
            inversion: "exact", or the cheaper "factored".
        """
        return self._apply(v, lambda block, V: block.solve(V, damping, inversion))

    def trace(self) -> Float[Tensor, ""]:
        """The trace of the whole matrix."""
        return torch.stack([block.trace() for block in self.values()]).sum()

    def logdet(self, damping: float = 0.0, inversion: Inversion = "exact") -> Float[Tensor, ""]:
        """log det (C + damping · I)."""
        return torch.stack([b.logdet(damping, inversion) for b in self.values()]).sum()

    def sample(
        self,
        damping: float,
        generator: torch.Generator | None = None,
        inversion: Inversion = "exact",
    ) -> dict[str, Tensor]:
        """A draw from the Gaussian of covariance (C + damping · I)⁻¹, by parameter name.

        Added to the parameters it is a draw from a Laplace approximation of the posterior.
        """
        result: dict[str, Tensor] = {}
        for name, block in self.items():
            drawn = block.invert(damping, inversion).sample(generator)
            result.update(self.theta[name].tensors(drawn))
        return result

    def dense(self) -> Float[Tensor, "p p"]:
        """The whole matrix with its zeros, for small models."""
        return torch.block_diag(*(block.dense() for block in self.values()))

    def average(self, newer: Curvature, decay: float = 0.9) -> Curvature:
        """The running average decay · self + (1 − decay) · newer (section 5)."""
        self._check_alike(newer)
        blocks = {name: averaged(block, newer[name], decay) for name, block in self.items()}
        return Curvature(blocks, self.theta, data=newer.data, weight=newer.weight)

    def merge(self, other: Curvature) -> Curvature:
        """The curvature of two batches together, by their numbers of data."""
        self._check_alike(other)
        shares, weight = (1.0, 1.0), None
        if self.weight is not None and other.weight is not None:
            weight = self.weight + other.weight
            shares = (self.weight / weight, other.weight / weight) if weight else (0.5, 0.5)
        data = (self.data, other.data)
        blocks = {name: merged(block, other[name], data, shares) for name, block in self.items()}
        return Curvature(blocks, self.theta, data=sum(data), weight=weight)

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and strings; ``torch.load(weights_only=True)`` takes it."""
        return {
            "blocks": {name: block.state_dict() for name, block in self.items()},
            "data": self.data,
            "weight": self.weight,
        }

    @classmethod
    def from_state_dict(cls, model: nn.Module, state: Mapping[str, Any]) -> Curvature:
        """The curvature again, for a model of the same layers."""
        theta = Theta(model)
        blocks = {name: load_block(part) for name, part in state["blocks"].items()}
        for group in theta:
            block = blocks.get(group.name)
            if block is None or (block.rows, block.columns) != (group.rows, group.columns):
                raise ValueError(
                    f"the saved curvature does not fit layer '{group.name}', which needs a block "
                    f"for a matrix [{group.rows}, {group.columns}]"
                )
        return cls(blocks, theta, data=state["data"], weight=state["weight"])

    def _check_alike(self, other: Curvature) -> None:
        for name in self.blocks.keys() | other.blocks.keys():
            a, b = self.blocks.get(name), other.blocks.get(name)
            either_zero = isinstance(a, ZeroBlock) or isinstance(b, ZeroBlock)
            fits = a is not None and b is not None and (a.kind == b.kind or either_zero)
            if not fits or (a.rows, a.columns) != (b.rows, b.columns):  # type: ignore[union-attr]
                raise ValueError(
                    f"the two curvatures differ at layer '{name}': they must be of one model and "
                    "one kind of block"
                )

    def _apply(self, v: Any, operation: Callable[[Block, Tensor], Tensor]) -> Any:
        if isinstance(v, Tensor):
            matrices = self.theta.matrices(v)
            return self.theta.join({k: operation(self[k], V) for k, V in matrices.items()})
        self._check_vectors(v)
        result: dict[str, Tensor] = {}
        for name, block in self.items():
            group = self.theta[name]
            result.update(group.tensors(operation(block, group.matrix(v))))
        return result

    def _check_vectors(self, v: Any) -> None:
        if not isinstance(v, Mapping):
            raise TypeError(
                f"a vector is a flat tensor or a mapping from parameter names to tensors, not "
                f"{type(v).__name__}; e.g. {{name: p.grad for name, p in model.named_parameters()}}"
            )
        for group in self.theta:
            for key, parameter in group.parameters.items():
                found = v.get(key)
                if not isinstance(found, Tensor) or found.shape != parameter.shape:
                    what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else found
                    raise ValueError(
                        f"the vector's part for '{key}' must have shape "
                        f"{tuple(parameter.shape)}, but is {what}"
                    )


def load_block(state: Mapping[str, Any]) -> Block:
    """The block of a saved state."""
    if state["type"] == "grouped":
        parts = [load_block(part) for part in state["parts"]]
        return GroupedBlock(
            tuple(p for p in parts if isinstance(p, (KroneckerBlock, EigenBlock, TiledBlock)))
        )
    kinds: dict[str, Callable[..., Block]] = {
        "kronecker": KroneckerBlock,
        "dense": DenseBlock,
        "diagonal": DiagonalBlock,
        "scaled": ScaledBlock,
        "tiled": TiledBlock,
        "zero": ZeroBlock,
        "eigen": EigenBlock,
    }
    return kinds[state["type"]](**{key: value for key, value in state.items() if key != "type"})
