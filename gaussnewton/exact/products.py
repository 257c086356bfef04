"""Products of Hessian, Gauss-Newton and Fisher with a vector, without the matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.exact.batch import Criterion, Evaluation, evaluate, loss
from gaussnewton.exact.differentiation import gradient
from gaussnewton.exact.output_fisher import fisher_blocks_of_outputs
from gaussnewton.exact.output_hessian import OutputProduct, output_hessian_product
from gaussnewton.model_state import unchanged
from gaussnewton.parameters import Group

Product = Callable[[Float[Tensor, " p"]], Float[Tensor, " p"]]
"""Multiplies a vector in the order of θ (:class:`gaussnewton.parameters.Theta`)."""


def hessian_product(
    model: nn.Module, criterion: Criterion, batch: Sequence[Any], *, damping: float = 0.0
) -> Product:
    r"""The map :math:`v ↦ H v + \text{damping} \, v` with :math:`Hv = ∇_θ (∇_θ E^T v)`.

    The graph of the gradient is recorded once, here; a product is one pass through it. The
    result holds that graph, and is that of the parameters as they were now.

    Args:
        model: Any module. It is left as it was.
        criterion: Called as ``criterion(outputs, targets)``.
        batch: The pair (inputs, targets).
        damping: Not negative.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model, x, y = torch.nn.Linear(1, 1, bias=False), torch.ones(2, 1), torch.zeros(2, 1)
        >>> gn.exact.hessian_product(model, torch.nn.MSELoss(), (x, y), damping=1.0)(torch.ones(1))
        tensor([3.])
    """
    with unchanged(model):
        seen = evaluate(model, criterion, batch)
        groups = list(seen.theta)
        first = gradient(loss(criterion, seen.outputs, seen.targets), groups, create_graph=True)

    def product(v: Tensor) -> Tensor:
        return gradient(first, groups, weights=v.to(first))

    return _finished(model, seen.theta.size, product, damping)


def gauss_newton_product(
    model: nn.Module, criterion: Criterion, batch: Sequence[Any], *, damping: float = 0.0
) -> Product:
    r"""The map :math:`v ↦ J^T \mathcal H_L J v + \text{damping} \, v` (eq. gn:expect).

    The forward pass is recorded once, here. :math:`Jv` is found by differentiating
    :math:`u ↦ J^T u`, which is linear, by u, so that reverse mode does for it. For criteria
    known to be convex :math:`\mathcal H_L` is never formed; for others it is, because its
    PSD part is meant.

    Args:
        model: Any module. It is left as it was.
        criterion: Called as ``criterion(outputs, targets)``.
        batch: The pair (inputs, targets).
        damping: Not negative.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model, x, y = torch.nn.Linear(1, 1, bias=False), torch.ones(2, 1), torch.zeros(2, 1)
        >>> gn.exact.gauss_newton_product(model, torch.nn.MSELoss(), (x, y))(torch.ones(1))
        tensor([2.])
    """
    return _sandwich_product(model, criterion, batch, output_hessian_product, damping)


def gauss_newton_block_products(
    model: nn.Module, criterion: Criterion, batch: Sequence[Any], *, damping: float = 0.0
) -> dict[str, Product]:
    r"""The maps :math:`v ↦ G_λ v + \text{damping} \, v` of the diagonal blocks (eq. gn:blocks).

    :math:`G_λ v = J_λ^T \mathcal H_L J_λ v` with the derivatives of one layer's matrix alone.
    It is what :func:`gauss_newton_product` does to a vector that is zero in all other layers,
    but only the part of the graph behind the layer is gone through. All products share one
    recorded forward pass.

    Args:
        model: Any module. It is left as it was.
        criterion: Called as ``criterion(outputs, targets)``.
        batch: The pair (inputs, targets).
        damping: Not negative.

    Returns:
        A product for each module that owns trainable parameters, by the module's name; it
        takes and returns the part of θ that is the module's.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
        >>> x, y = torch.ones(2, 1), torch.zeros(2, 1)
        >>> products = gn.exact.gauss_newton_block_products(model, torch.nn.MSELoss(), (x, y))
        >>> products["0"](torch.ones(1))
        tensor([2.])
    """
    with unchanged(model):
        sandwich = _Sandwich(evaluate(model, criterion, batch), criterion, output_hessian_product)
        return {group.name: sandwich.product(model, [group], damping) for group in sandwich.groups}


def fisher_product(
    model: nn.Module, criterion: Criterion, batch: Sequence[Any], *, damping: float = 0.0
) -> Product:
    r"""The map :math:`v ↦ F v + \text{damping} \, v` with F of :func:`gaussnewton.exact.fisher`.

    As :func:`gauss_newton_product`, with the Fisher of the outputs in the middle, which is
    kept as one small block for each independent output variable.

    Args:
        model: Any module. It is left as it was.
        criterion: A negative log-likelihood of torch, or an object with ``support(outputs)``.
        batch: The pair (inputs, targets).
        damping: Not negative.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model, x, y = torch.nn.Linear(1, 1, bias=False), torch.ones(2, 1), torch.zeros(2, 1)
        >>> product = gn.exact.fisher_product(model, torch.nn.MSELoss(), (x, y))
        >>> round(product(torch.ones(1)).item(), 4)
        2.0
    """
    return _sandwich_product(model, criterion, batch, fisher_blocks_of_outputs, damping)


def _sandwich_product(
    model: nn.Module,
    criterion: Criterion,
    batch: Sequence[Any],
    middle: Callable[[Criterion, Tensor, Any], OutputProduct],
    damping: float,
) -> Product:
    with unchanged(model):
        sandwich = _Sandwich(evaluate(model, criterion, batch), criterion, middle)
        return sandwich.product(model, sandwich.groups, damping)


class _Sandwich:
    """v ↦ Jᵀ M J v from one recorded forward pass, for θ or for some of its groups."""

    def __init__(
        self,
        seen: Evaluation,
        criterion: Criterion,
        middle: Callable[[Criterion, Tensor, Any], OutputProduct],
    ) -> None:
        self.groups, self.outputs = list(seen.theta), seen.outputs
        self.multiply = middle(criterion, seen.outputs.detach(), seen.targets)
        self.u = torch.zeros_like(seen.outputs, requires_grad=True)

    def product(self, model: nn.Module, groups: Sequence[Group], damping: float) -> Product:
        pulled_back = gradient(self.outputs, groups, weights=self.u, create_graph=True)

        def product(v: Tensor) -> Tensor:
            (jv,) = torch.autograd.grad(
                pulled_back, self.u, v.to(pulled_back), retain_graph=True, materialize_grads=True
            )
            return gradient(self.outputs, groups, weights=self.multiply(jv))

        return _finished(model, len(pulled_back), product, damping)


def _finished(model: nn.Module, size: int, product: Product, damping: float) -> Product:
    """Add what all products do: check the vector, leave the model alone, damp."""
    if damping < 0:
        raise ValueError(f"damping is {damping}; it must not be negative")

    def finished(v: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        if v.shape != (size,):
            raise ValueError(
                f"a vector of shape {tuple(v.shape)} does not fit θ, which has {size} entries"
            )
        with unchanged(model):  # a checkpointed model runs its forward pass again in backward
            return (product(v.detach()) + damping * v).detach()

    return finished
