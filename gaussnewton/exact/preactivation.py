r"""Curvature of the loss by the pre-activations :math:`h_λ` of linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gaussnewton.batch import as_batch, call_model
from gaussnewton.exact.batch import Criterion, evaluate, loss
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
    with unchanged(model), _watch_linear_layers(model) as calls:
        seen = evaluate(model, criterion, batch)
        middles = output_hessian(criterion, seen.outputs.detach(), seen.targets)
        outputs = seen.outputs.reshape(len(seen.outputs), -1)
        for call in _called_once(calls, len(outputs)):
            if call.trained:
                jacobians = _own_rows(outputs, call.edge)
                result[call.name] = (jacobians.mT @ middles @ jacobians).sum(dim=0)
    return {name: result[name] for name in seen.theta.groups if name in result}


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
    with unchanged(model), _watch_linear_layers(model) as calls:
        seen = evaluate(model, criterion, batch)
        value = loss(criterion, seen.outputs, seen.targets)
        for call in _called_once(calls, len(seen.outputs)):
            if call.trained:
                (first,) = torch.autograd.grad(
                    value, [call.edge], create_graph=True, materialize_grads=True
                )
                result[call.name] = _own_rows(first, call.edge)
    return {name: result[name] for name in seen.theta.groups if name in result}


def recursive_gauss_newton(
    model: nn.Module, criterion: Criterion, batch: Sequence[Any]
) -> dict[str, Float[Tensor, "out out"]]:
    r"""The nested expectation :math:`\hat G_λ = E[J^T \hat G_{λ+1} J]` of section 3.5.

    Here :math:`J = ∂h_{λ+1} / ∂h_λ` for one datum, formed for every datum. It starts from the
    exact sum at the last layer. It is what KFRA is defined to be, and equals
    :func:`preactivation_gauss_newton` for one datum.

    Args:
        model: A chain of :class:`torch.nn.Linear` layers, each called once. It is left as it
            was.
        criterion: Called as ``criterion(outputs, targets)``.
        batch: The pair (inputs, targets).

    Returns:
        A matrix for each linear layer with trainable parameters, by name.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2))
        >>> x, y = torch.ones(4, 3), torch.ones(4, 2)
        >>> gn.exact.recursive_gauss_newton(model, torch.nn.MSELoss(reduction="sum"), (x, y))
        {'0': tensor([[8., 0.],
                      [0., 8.]])}
    """
    result: dict[str, Tensor] = {}
    with unchanged(model), _watch_linear_layers(model) as calls:
        seen = evaluate(model, criterion, batch)
        *earlier, last = _called_once(calls, len(seen.outputs))
        middles = output_hessian(criterion, seen.outputs.detach(), seen.targets)
        jacobians = _own_rows(seen.outputs.reshape(len(seen.outputs), -1), last.edge)
        matrix = (jacobians.mT @ middles @ jacobians).sum(dim=0)
        result[last.name] = matrix
        following = last
        for call in reversed(earlier):
            J = _jacobians(following, call)
            matrix = (J.mT @ matrix @ J).mean(dim=0)
            result[call.name], following = matrix, call
    return {name: result[name] for name in seen.theta.groups if name in result}


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
            call_model(model, as_batch(batch))
    finally:
        for handle in handles:
            handle.remove()
    return result


@dataclass(frozen=True)
class _Call:
    """What one call of a layer returned: a place in the graph, a shape, and a zero like it."""

    name: str
    trained: bool
    edge: GradientEdge
    shape: torch.Size
    zero: Tensor


@contextmanager
def _watch_linear_layers(model: nn.Module) -> Iterator[list[_Call]]:
    """Note where in the graph the outputs of linear layers are, in the order of the calls.

    A place in the graph is kept and not the tensor, because an activation that works in place
    gives the tensor another value and another place.
    """
    calls: list[_Call] = []
    handles = [
        module.register_forward_hook(_note_in(calls, name), prepend=True)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _note_in(calls: list[_Call], name: str) -> Any:
    def hook(module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.requires_grad:
            trained = any(p.requires_grad for p in module.parameters(recurse=False))
            edge, zero = get_gradient_edge(output), output.detach().new_zeros(())
            calls.append(_Call(name, trained, edge, output.shape, zero))

    return hook


def _called_once(calls: list[_Call], n: int) -> list[_Call]:
    """The layers that were called once, and once for each datum."""
    names = [call.name for call in calls]
    return [
        call
        for call in calls
        if names.count(call.name) == 1 and len(call.shape) == 2 and call.shape[0] == n
    ]


def _jacobians(end: _Call, start: _Call) -> Float[Tensor, "n k out"]:
    """The derivatives of one layer's pre-activations by an earlier layer's, datum by datum."""
    rows = []
    for k in range(end.shape[1]):
        unit = end.zero.repeat(end.shape)
        unit[:, k] = 1
        (row,) = torch.autograd.grad([end.edge], [start.edge], [unit], retain_graph=True)
        rows.append(row)
    return torch.stack(rows, dim=1)


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
