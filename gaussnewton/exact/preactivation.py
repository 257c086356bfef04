r"""Curvature of the loss by the pre-activations :math:`h_λ` of linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gaussnewton.exact.batch import Criterion, evaluate, loss, run
from gaussnewton.exact.output_hessian import output_hessian
from gaussnewton.model_state import unchanged


def preactivation_gauss_newton(
    model: nn.Module, criterion: Criterion, batch: Sequence[Any]
) -> dict[str, Float[Tensor, "out out"]]:
    r"""The sums :math:`\sum_n \mathcal G_{λ,n}` of :math:`\mathcal G_λ = J^T \mathcal H_L J`.

    Here :math:`J = ∂h_L / ∂h_λ` for one datum (the definition above eq. gn:blocks with λ = β).
    The scale is that of the scalar the criterion returns, so that for a mean over data this is
    the paper's average :math:`E[\mathcal G_λ]`.

    Args:
        model: Any module. It is left as it was.
        criterion: Called as ``criterion(outputs, targets)``.
        batch: The pair (inputs, targets).

    Returns:
        A matrix for each :class:`torch.nn.Linear` with trainable parameters that was called
        once and gave a matrix ``[N, out]``, by name. Layers used otherwise are left out.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2))
        >>> x, y = torch.ones(4, 3), torch.ones(4, 2)
        >>> gn.exact.preactivation_gauss_newton(model, torch.nn.MSELoss(reduction="sum"), (x, y))
        {'0': tensor([[8., 0.],
                      [0., 8.]])}
    """
    result: dict[str, Tensor] = {}
    with unchanged(model), _watch_linear_layers(model) as layers:
        seen = evaluate(model, criterion, batch)
        middles = output_hessian(criterion, seen.outputs.detach(), seen.targets)
        outputs = seen.outputs.reshape(len(seen.outputs), -1)
        for name, edge in _preactivations(layers, len(outputs)).items():
            jacobians = _own_rows(outputs, edge)
            result[name] = (jacobians.mT @ middles @ jacobians).sum(dim=0)
    return result


def preactivation_hessian(
    model: nn.Module, criterion: Criterion, batch: Sequence[Any]
) -> dict[str, Float[Tensor, "n out out"]]:
    r"""The matrices :math:`[\mathcal H_λ]_{ab} = ∂^2 E / ∂h^λ_a ∂h^λ_b` of each datum.

    Eq. notations. The scale is that of the scalar the criterion returns, so that for a mean
    over data each contains 1/N. They need not be PSD.

    Args:
        model: Any module. It is left as it was.
        criterion: Called as ``criterion(outputs, targets)``.
        batch: The pair (inputs, targets).

    Returns:
        One matrix a datum for each layer that :func:`preactivation_gauss_newton` has.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2))
        >>> x, y = torch.ones(4, 3), torch.ones(4, 2)
        >>> gn.exact.preactivation_hessian(model, torch.nn.MSELoss(reduction="sum"), (x, y))["0"][0]
        tensor([[2., 0.],
                [0., 2.]])
    """
    result: dict[str, Tensor] = {}
    with unchanged(model), _watch_linear_layers(model) as layers:
        seen = evaluate(model, criterion, batch)
        value = loss(criterion, seen.outputs, seen.targets)
        for name, edge in _preactivations(layers, len(seen.outputs)).items():
            (first,) = torch.autograd.grad(value, [edge], create_graph=True, materialize_grads=True)
            result[name] = _own_rows(first, edge)
    return result


def input_moments(
    model: nn.Module, batch: Sequence[Any]
) -> dict[str, Float[Tensor, "columns columns"]]:
    r"""The averages :math:`E[a a^T]` of the inputs of linear layers (eq. q2).

    The input has a 1 at its end where the layer trains a bias, and is that 1 alone where the
    weight is frozen.

    Args:
        model: Any module. It is left as it was.
        batch: The pair (inputs, targets).

    Returns:
        A matrix for each :class:`torch.nn.Linear` with trainable parameters that was called
        on a matrix ``[N, in]``, by name.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 2))
        >>> gn.exact.input_moments(model, (torch.tensor([[1.0], [3.0]]), None))
        {'0': tensor([[5., 2.],
                      [2., 1.]])}
    """
    result: dict[str, Tensor] = {}

    def hook(name: str, module: nn.Linear, input: Tensor) -> None:
        parts = [input.detach()] if module.weight.requires_grad else []
        if module.bias is not None and module.bias.requires_grad:
            parts.append(torch.ones_like(input.detach()[:, :1]))
        if parts and input.ndim == 2:
            rows = torch.cat(parts, dim=1)
            result[name] = torch.einsum("ni,nj->ij", rows, rows) / len(rows)

    handles = [
        module.register_forward_hook(
            lambda m, args, kwargs, _, name=name: hook(
                name, m, args[0] if args else kwargs["input"]
            ),
            with_kwargs=True,
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        with unchanged(model):
            run(model, batch[0])
    finally:
        for handle in handles:
            handle.remove()
    return result


@dataclass
class _Calls:
    """What one layer returned: a place in the graph and a shape, for each call."""

    edges: list[GradientEdge] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)


@contextmanager
def _watch_linear_layers(model: nn.Module) -> Iterator[dict[str, _Calls]]:
    """Note where in the graph each trainable linear layer's output is.

    A place in the graph is kept and not the tensor, because an activation that works in place
    gives the tensor another value and another place.
    """
    calls: dict[str, _Calls] = {}
    handles = []
    for name, module in model.named_modules():
        own = module.parameters(recurse=False)
        if isinstance(module, nn.Linear) and any(p.requires_grad for p in own):
            calls[name] = _Calls()
            handles.append(module.register_forward_hook(_note_in(calls[name])))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _note_in(calls: _Calls) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        calls.edges.append(get_gradient_edge(output))
        calls.shapes.append(output.shape)

    return hook


def _preactivations(layers: dict[str, _Calls], n: int) -> dict[str, GradientEdge]:
    """The layers that were called once, and once for each datum."""
    return {
        name: calls.edges[0]
        for name, calls in layers.items()
        if len(calls.edges) == 1 and len(calls.shapes[0]) == 2 and calls.shapes[0][0] == n
    }


def _own_rows(function: Float[Tensor, "n k"], edge: GradientEdge) -> Float[Tensor, "n k out"]:
    """The derivatives of each datum's values by the same datum's pre-activation.

    Where the data do not influence each other, a sum over data has the derivative of each
    datum's own value in each row, and one pass serves all of them.
    """
    if _apart(function, edge):
        return torch.stack([_derivative(column.sum(), edge) for column in function.T], dim=1)
    return torch.stack(
        [
            torch.stack([_derivative(entry, edge)[n] for entry in row])
            for n, row in enumerate(function)
        ]
    )


def _apart(function: Float[Tensor, "n k"], edge: GradientEdge) -> bool:
    """Whether the values of each second datum, randomly weighted, leave the others alone."""
    random = torch.Generator().manual_seed(0)
    weights = torch.rand(function.shape, generator=random, dtype=torch.float64).to(function)
    derivative = _derivative((weights * function)[::2].sum(), edge)
    return not bool(derivative[1::2].any())


def _derivative(value: Float[Tensor, ""], edge: GradientEdge) -> Float[Tensor, "n out"]:
    (derivative,) = torch.autograd.grad(value, [edge], retain_graph=True)
    return derivative
