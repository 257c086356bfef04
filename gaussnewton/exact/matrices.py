"""Hessian, Gauss-Newton and Fisher as dense matrices, whole and by diagonal blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.exact.batch import Criterion, evaluate, loss
from gaussnewton.exact.differentiation import gradient
from gaussnewton.exact.output_fisher import output_fisher
from gaussnewton.exact.output_hessian import output_hessian
from gaussnewton.model_state import unchanged
from gaussnewton.parameters import Theta

Blocks = dict[str, Float[Tensor, "_ _"]]
"""A matrix for each module that owns trainable parameters, by the module's name."""


def hessian(model: nn.Module, criterion: Criterion, batch: Sequence[Any]) -> Float[Tensor, "p p"]:
    r"""The matrix :math:`[H]_{ij} = ∂^2 E / ∂θ_i ∂θ_j` of the scalar E the criterion returns.

    It is what section 2.2 of the paper defines, and need not be PSD.

    Args:
        model: Any module. It is left as it was.
        criterion: Called as ``criterion(outputs, targets)``.
        batch: The pair (inputs, targets).

    Returns:
        Rows and columns in the order of θ (:class:`gaussnewton.parameters.Theta`).

    Example:
        >>> import torch, gaussnewton as gn
        >>> model, x, y = torch.nn.Linear(1, 1, bias=False), torch.ones(2, 1), torch.zeros(2, 1)
        >>> gn.exact.hessian(model, torch.nn.MSELoss(), (x, y))
        tensor([[2.]])
    """
    return _hessian(model, criterion, batch, whole=True)[""]


def hessian_blocks(model: nn.Module, criterion: Criterion, batch: Sequence[Any]) -> Blocks:
    r"""The diagonal blocks :math:`H_λ = ∂^2 E / ∂\mathrm{vec}(W_λ) ∂\mathrm{vec}(W_λ)^T`.

    Eq. hess:kron, one block for each module that owns trainable parameters. The full matrix
    is not built.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 1))
        >>> x, y = torch.ones(2, 3), torch.ones(2, 1)
        >>> gn.exact.hessian_blocks(model, torch.nn.MSELoss(), (x, y))["0"].shape
        torch.Size([4, 4])
    """
    return _hessian(model, criterion, batch, whole=False)


def gauss_newton(
    model: nn.Module, criterion: Criterion, batch: Sequence[Any]
) -> Float[Tensor, "p p"]:
    r"""The matrix :math:`G = \sum_n J_n^T \mathcal H_{L,n} J_n` with :math:`J_n = ∂h_{L,n}/∂θ`.

    Eq. gn:expect, in the scale of the scalar that the criterion returns: for a mean over
    data :math:`\mathcal H_{L,n}` contains the 1/N. It is the PSD part of the criterion's second
    derivative, as :func:`gaussnewton.exact.output_hessian` says.

    Args:
        model: Any module. It is left as it was.
        criterion: Called as ``criterion(outputs, targets)``.
        batch: The pair (inputs, targets).

    Returns:
        Rows and columns in the order of θ (:class:`gaussnewton.parameters.Theta`).

    Example:
        >>> import torch, gaussnewton as gn
        >>> model, x, y = torch.nn.Linear(1, 1, bias=False), torch.ones(2, 1), torch.zeros(2, 1)
        >>> gn.exact.gauss_newton(model, torch.nn.MSELoss(), (x, y))
        tensor([[2.]])
    """
    return _sandwich(model, criterion, batch, output_hessian, whole=True)[""]


def gauss_newton_blocks(model: nn.Module, criterion: Criterion, batch: Sequence[Any]) -> Blocks:
    r"""The diagonal blocks :math:`G_λ = \sum_n (a_{λ-1} a_{λ-1}^T) ⊗ \mathcal G_λ`.

    Eq. gn:blocks, found as :math:`\sum_n J_{n,λ}^T \mathcal H_{L,n} J_{n,λ}` for each module
    that owns trainable parameters, whatever its type. The full matrix is not built.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 1))
        >>> x, y = torch.ones(2, 3), torch.ones(2, 1)
        >>> gn.exact.gauss_newton_blocks(model, torch.nn.MSELoss(), (x, y))["0"].trace()
        tensor(8.)
    """
    return _sandwich(model, criterion, batch, output_hessian, whole=False)


def fisher(model: nn.Module, criterion: Criterion, batch: Sequence[Any]) -> Float[Tensor, "p p"]:
    r"""The matrix :math:`F = \sum_n c_n \, E_{y ∼ p_θ(y|x_n)}[∇_θ \log p_θ ∇_θ \log p_θ^T]`.

    Eq. fisher:def with the inputs of the batch; :math:`c_n` is the weight of datum n in the
    scalar that the criterion returns. The expectation is exact, as
    :func:`gaussnewton.exact.output_fisher` says. Where the outputs are natural parameters of
    an exponential family it equals the Gauss-Newton matrix (eq. fisher:equiv).

    Args:
        model: Any module. It is left as it was.
        criterion: A negative log-likelihood of torch, or an object with ``support(outputs)``.
        batch: The pair (inputs, targets).

    Raises:
        UnsupportedLossError: If the criterion does not tell a distribution.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model, x, y = torch.nn.Linear(1, 1, bias=False), torch.ones(2, 1), torch.zeros(2, 1)
        >>> round(gn.exact.fisher(model, torch.nn.MSELoss(), (x, y)).item(), 4)
        2.0
    """
    return _sandwich(model, criterion, batch, output_fisher, whole=True)[""]


def fisher_blocks(model: nn.Module, criterion: Criterion, batch: Sequence[Any]) -> Blocks:
    r"""The diagonal blocks :math:`F_λ` of :func:`fisher`, without the full matrix.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 1))
        >>> x, y = torch.ones(2, 3), torch.ones(2, 1)
        >>> round(gn.exact.fisher_blocks(model, torch.nn.MSELoss(), (x, y))["0"].trace().item(), 4)
        8.0
    """
    return _sandwich(model, criterion, batch, output_fisher, whole=False)


def split(
    matrix: Float[Tensor, "p p"], model: nn.Module
) -> dict[tuple[str, str], Float[Tensor, "_ _"]]:
    r"""The blocks :math:`C_{λβ}` of a matrix over θ, for all pairs of modules (λ, β).

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        >>> gn.exact.split(torch.eye(11), model)["0", "1"].shape
        torch.Size([8, 3])
    """
    slices = Theta(model).slices
    size = sum(part.stop - part.start for part in slices.values())
    if matrix.shape != (size, size):
        raise ValueError(
            f"a matrix of shape {tuple(matrix.shape)} does not fit θ, which has {size} entries"
        )
    return {
        (a, b): matrix[rows, columns] for a, rows in slices.items() for b, columns in slices.items()
    }


def _hessian(
    model: nn.Module, criterion: Criterion, batch: Sequence[Any], *, whole: bool
) -> Blocks:
    """Differentiate the gradient of each part again, entry by entry."""
    result: Blocks = {}
    with unchanged(model):
        seen = evaluate(model, criterion, batch)
        value = loss(criterion, seen.outputs, seen.targets)
        parts = {"": list(seen.theta)} if whole else {g.name: [g] for g in seen.theta}
        for name, groups in parts.items():
            first = gradient(value, groups, create_graph=True)
            result[name] = torch.stack([gradient(entry, groups) for entry in first])
    return result


def _sandwich(
    model: nn.Module,
    criterion: Criterion,
    batch: Sequence[Any],
    middle: Callable[[Criterion, Any, Any], Float[Tensor, "n d d"]],
    *,
    whole: bool,
) -> Blocks:
    r"""Sum :math:`J_n^T M_n J_n` over data, one datum's Jacobian at a time."""
    with unchanged(model):
        seen = evaluate(model, criterion, batch)
        theta, outputs = seen.theta, seen.outputs
        parts = {"": slice(0, theta.size)} if whole else theta.slices
        middles = middle(criterion, outputs.detach(), seen.targets)
        result: Blocks = {}
        for datum, matrix in zip(outputs.reshape(len(outputs), -1), middles, strict=True):
            jacobian = torch.stack([gradient(entry, list(theta)) for entry in datum])
            for name, part in parts.items():
                own = jacobian[:, part]
                term = own.T @ matrix @ own
                result[name] = result[name] + term if name in result else term
    return result
