r"""The parameter vector θ of the paper.

The paper stacks the weight matrices column by column,

.. math:: θ = [\mathrm{vec}(W_1)^T, \mathrm{vec}(W_2)^T, …, \mathrm{vec}(W_L)^T]^T,

with the bias absorbed as the last column of each :math:`W_λ`. This file says how the
parameters of a :class:`torch.nn.Module` form that vector: one :class:`Group` for each
module that owns trainable parameters, in the order of ``model.named_modules()``. A module that
owns several matrices, as a recurrent one does, has a group for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter

from gaussnewton.errors import NoTrainableParametersError, UnsupportedLayerError


@dataclass(frozen=True)
class Group:
    """Trainable parameters of one module, seen as one matrix ``[W | b]``.

    A weight with two or more dimensions gives the rows (its first dimension) and a bias
    of that length is the last column; a bias alone is the only column. Parameters of any
    other shape are laid end to end in a single row.

    Attributes:
        name: the module's qualified name; for one of several groups of a module, or one without a
            weight or bias, that of its first parameter.
        parameters: by qualified name.
        rows: of the matrix.
        columns: of the matrix.
        module: the qualified name of the module that owns them.
    """

    name: str
    parameters: Mapping[str, nn.Parameter]
    rows: int
    columns: int
    module: str

    @classmethod
    def of(
        cls, name: str, parameters: Mapping[str, nn.Parameter], module: str | None = None
    ) -> Group:
        """Group parameters of a module, given by qualified name; by default that of the group."""
        # Weight before bias, whichever was registered first (pruning, for one, swaps them).
        parameters = dict(sorted(parameters.items(), key=lambda item: item[1].ndim < 2))
        first, *rest = parameters.values()
        is_matrix = len(rest) <= 1 and all(p.shape == first.shape[:1] for p in rest)
        rows = first.shape[0] if is_matrix and (first.ndim >= 2 or not rest) and first.ndim else 1
        columns = sum(p.numel() for p in parameters.values()) // rows
        return cls(name, parameters, rows, columns, name if module is None else module)

    @property
    def part(self) -> str:
        """Its first parameter's name inside of the module."""
        return next(iter(self.parameters)).rpartition(".")[2]

    @property
    def size(self) -> int:
        """How many numbers the group holds."""
        return self.rows * self.columns

    def matrix(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, "rows columns"]:
        """Collect tensors shaped like the parameters into ``[W | b]``."""
        return torch.cat([tensors[key].reshape(self.rows, -1) for key in self.parameters], dim=1)

    def tensors(self, matrix: Float[Tensor, "rows columns"]) -> dict[str, Tensor]:
        """Take ``[W | b]`` apart again; the inverse of :meth:`matrix`."""
        parts = self.parts(matrix)
        return {key: parts[key].reshape(p.shape) for key, p in self.parameters.items()}

    def parts(self, matrix: Float[Tensor, "rows columns"]) -> dict[str, Float[Tensor, "rows _"]]:
        """Where each parameter lies in ``[W | b]``, as views of its columns."""
        widths = [p.numel() // self.rows for p in self.parameters.values()]
        return dict(zip(self.parameters, matrix.split(widths, dim=1), strict=True))


class Theta:
    """The layout of θ for one model.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
        >>> theta = gn.Theta(model)
        >>> theta.size, [(g.name, g.rows, g.columns) for g in theta]
        (8, [('0', 2, 4)])
        >>> v = theta.vector(dict(model.named_parameters()))
        >>> torch.equal(v[:2], model[0].weight[:, 0])       # vec goes column by column
        True
    """

    def __init__(self, model: nn.Module) -> None:
        seen: set[int] = set()
        self.groups: dict[str, Group] = {}
        for name, module in model.named_modules():
            own = {
                f"{name}.{key}" if name else key: p
                for key, p in module.named_parameters(recurse=False)
                if p.requires_grad and id(p) not in seen
            }
            if any(isinstance(p, UninitializedParameter) for p in own.values()):
                raise UnsupportedLayerError(
                    f"layer '{name}' of type {type(module).__name__} has parameters without a "
                    "shape yet. Call the model once before asking for curvature."
                )
            seen.update(id(p) for p in own.values())
            for group in _groups_of(name, module, own):
                self.groups[group.name] = group
        if not self.groups:
            raise NoTrainableParametersError(
                f"{type(model).__name__} has no parameter with requires_grad=True, so there is "
                "no curvature to compute. Unfreeze at least one layer."
            )

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups.values())

    def __getitem__(self, name: str) -> Group:
        return self.groups[name]

    @property
    def size(self) -> int:
        """The length of θ."""
        return sum(group.size for group in self)

    @property
    def slices(self) -> dict[str, slice]:
        """Where each group lies in θ."""
        result, start = {}, 0
        for group in self:
            result[group.name] = slice(start, start + group.size)
            start += group.size
        return result

    def vector(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, " p"]:
        """Flatten tensors named and shaped like the parameters into one vector."""
        return torch.cat([group.matrix(tensors).T.reshape(-1) for group in self])

    def tensors(self, vector: Float[Tensor, " p"]) -> dict[str, Tensor]:
        """Cut a vector into tensors named and shaped like the parameters."""
        result: dict[str, Tensor] = {}
        for name, matrix in self.matrices(vector).items():
            result.update(self.groups[name].tensors(matrix))
        return result

    def matrices(self, vector: Float[Tensor, " p"]) -> dict[str, Float[Tensor, "rows columns"]]:
        """Cut a vector into one matrix ``[W | b]`` a group."""
        if vector.shape != (self.size,):
            raise ValueError(
                f"a vector of shape {tuple(vector.shape)} does not fit θ, which has {self.size} "
                "entries; gn.Theta(model).vector(tensors) makes one that fits"
            )
        return {
            group.name: vector[part].reshape(group.columns, group.rows).T
            for group, part in zip(self, self.slices.values(), strict=True)
        }

    def join(self, matrices: Mapping[str, Tensor]) -> Float[Tensor, " p"]:
        """Stack one matrix a group into a vector; the inverse of :meth:`matrices`."""
        return torch.cat([matrices[group.name].T.reshape(-1) for group in self])


def _groups_of(name: str, module: nn.Module, own: Mapping[str, nn.Parameter]) -> Iterator[Group]:
    """The matrices that a module's own trainable parameters form."""
    parts = _matrices(module, own)
    for part in parts:
        first = next(iter(part))
        ordinary = first.rpartition(".")[2] in ("weight", "bias")
        yield Group.of(name if len(parts) == 1 and ordinary else first, part, name)


def _matrices(module: nn.Module, own: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Weight and bias of an ordinary layer together; of others, those that belong together.

    A bias belongs to a weight that is called like it, as ``bias_ih_l0`` to ``weight_ih_l0``, if it
    has an entry for each of its rows.
    """
    result: dict[str, dict[str, nn.Parameter]] = {}
    weights = {key: p for key, p in own.items() if "weight" in key.rpartition(".")[2]}
    for key, weight in weights.items():
        before, _, name = key.rpartition(".")
        bias_key = f"{before}.{name.replace('weight', 'bias')}".lstrip(".")
        bias = own.get(bias_key)
        fits = bias is not None and bias.shape in (weight.shape[:1], weight.shape)
        # The rows of a transposed convolution's weight are its inputs, even if there are as many.
        joined = fits and not isinstance(module, _ConvTransposeNd)
        result[key] = {key: weight} | ({bias_key: bias} if joined and bias is not None else {})
    taken = {key for part in result.values() for key in part}
    return [*result.values(), *({key: p} for key, p in own.items() if key not in taken)]
