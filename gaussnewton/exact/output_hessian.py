r"""The Hessian of the loss by the outputs, :math:`\mathcal H_L` (eq. notations with λ = L)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.errors import NonFiniteError, UnsupportedLossError
from gaussnewton.exact.batch import Criterion, loss, one_tensor

OutputProduct = Callable[[Float[Tensor, "n ..."]], Float[Tensor, "n ..."]]
"""Multiplies a tensor shaped like the outputs, datum by datum."""


def output_hessian(criterion: Criterion, outputs: Any, targets: Any) -> Float[Tensor, "n d d"]:
    r"""The PSD part of :math:`[\mathcal H_L]_n = ∂^2 E / ∂h_n ∂h_n^T` for each datum's outputs.

    E is the scalar that the criterion returns (its sum, if it returns more than one number),
    so that the 1/N of a mean is contained. The matrix of a datum that is not positive
    semi-definite is replaced by its PSD part: negative eigenvalues become zero. All others
    are kept as they come from autograd.

    :class:`torch.nn.NLLLoss` is linear in its log-probabilities and would have no curvature.
    Its Hessian is defined as that of ``NLLLoss(log_softmax(outputs, dim=1))``. The value is
    the same, because log_softmax leaves log-probabilities as they are, and the geometry is
    that of cross-entropy.

    Args:
        criterion: Called as ``criterion(outputs, targets)``.
        outputs: ``[N, …]``; for :class:`torch.nn.GaussianNLLLoss` with predicted variance, the
            pair (mean, variance), or both stacked along dimension 1.
        targets: A tensor, or a tuple that is passed on as several arguments.

    Returns:
        One matrix a datum; the outputs of a datum are numbered as ``flatten(1)`` does.

    Raises:
        UnsupportedLossError: If the criterion couples the data, so that E is no sum over them.
        NonFiniteError: If a second derivative is NaN or infinite.

    Example:
        >>> import torch, gaussnewton as gn
        >>> outputs, targets = torch.zeros(4, 2), torch.tensor([0, 1, 1, 0])
        >>> gn.exact.output_hessian(torch.nn.CrossEntropyLoss(reduction="sum"), outputs, targets)[0]
        tensor([[ 0.2500, -0.2500],
                [-0.2500,  0.2500]])
    """
    outputs = one_tensor(criterion, outputs).detach()
    product = raw_output_hessian_product(criterion, outputs, targets)
    units = torch.eye(outputs[0].numel(), dtype=outputs.dtype, device=outputs.device)
    columns = [product(unit.reshape(outputs[:1].shape).expand_as(outputs)) for unit in units]
    hessian = torch.stack([column.reshape(len(outputs), -1) for column in columns], dim=2)
    if not hessian.isfinite().all():
        raise NonFiniteError(
            "the criterion's second derivative by the outputs is NaN or infinite; look at the "
            "outputs and targets of this batch"
        )
    _check_separable(product, hessian, outputs)
    return psd_part(hessian)


def output_hessian_product(criterion: Criterion, outputs: Tensor, targets: Any) -> OutputProduct:
    r"""Multiplication with :func:`output_hessian`, without its matrices where that is possible.

    For a criterion known to be convex the PSD part of :math:`\mathcal H_L` is itself, and
    autograd multiplies with it. Otherwise the matrices are formed.
    """
    if is_convex(criterion, targets):
        return raw_output_hessian_product(criterion, outputs, targets)
    return multiply_by(output_hessian(criterion, outputs, targets))


def multiply_by(matrices: Float[Tensor, "n d d"]) -> OutputProduct:
    """Multiply each datum's outputs with its own matrix."""

    def product(u: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        return torch.einsum("nij,nj->ni", matrices, u.reshape(len(u), -1)).reshape(u.shape)

    return product


def raw_output_hessian_product(
    criterion: Criterion, outputs: Tensor, targets: Any
) -> OutputProduct:
    """Multiplication with the second derivative of E by the outputs, PSD or not."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = outputs.detach().clone().requires_grad_()
        value = _geometric_loss(criterion, leaf, targets)
        (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)

    def product(u: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        if not gradient.requires_grad:  # E is linear in the outputs
            return torch.zeros_like(u)
        (result,) = torch.autograd.grad(
            gradient, leaf, u, retain_graph=True, materialize_grads=True
        )
        return result

    return product


def psd_part(matrices: Float[Tensor, "n d d"]) -> Float[Tensor, "n d d"]:
    """Clip negative eigenvalues at zero where there are any beyond rounding."""
    symmetric = (matrices + matrices.mT) / 2
    values, vectors = torch.linalg.eigh(symmetric)
    rounding = torch.finfo(values.dtype).eps * values.shape[-1]
    indefinite = values[:, :1] < -rounding * values.abs().amax(dim=1, keepdim=True)
    clipped = (vectors * values.clamp(min=0).unsqueeze(1)) @ vectors.mT
    return torch.where(indefinite.unsqueeze(2), clipped, symmetric)


_CONVEX = (
    nn.MSELoss,
    nn.CrossEntropyLoss,
    nn.NLLLoss,
    nn.BCEWithLogitsLoss,
    nn.BCELoss,
    nn.L1Loss,
    nn.HuberLoss,
    nn.SmoothL1Loss,
    nn.SoftMarginLoss,
)


def is_convex(criterion: Criterion, targets: Any) -> bool:
    """Whether the criterion is known to be a convex function of the outputs.

    A subclass is known only as far as it calls what it inherits, and a negative weight turns
    a convex loss over.
    """
    weights = [getattr(criterion, name, None) for name in ("weight", "pos_weight")]
    if any(isinstance(w, Tensor) and bool((w < 0).any()) for w in weights):
        return False
    if is_plainly(criterion, nn.PoissonNLLLoss):
        return bool(getattr(criterion, "log_input", False))
    if is_plainly(criterion, nn.GaussianNLLLoss):
        return isinstance(targets, tuple)
    return any(is_plainly(criterion, known) for known in _CONVEX)


def is_plainly(criterion: Criterion, known: type[nn.Module]) -> bool:
    """Whether the criterion is of a known type and computes what that type computes."""
    return isinstance(criterion, known) and type(criterion).forward is known.forward


def _geometric_loss(criterion: Criterion, outputs: Tensor, targets: Any) -> Float[Tensor, ""]:
    """E, with the log_softmax that gives NLLLoss its curvature."""
    if isinstance(criterion, nn.NLLLoss):
        outputs = outputs.log_softmax(dim=1)
    return loss(criterion, outputs, targets)


def _check_separable(
    product: OutputProduct, hessian: Float[Tensor, "n d d"], outputs: Tensor
) -> None:
    """Raise if the data influence each other's second derivatives.

    The columns were found for all data at once, which is right only if they do not; a random
    direction, different for each datum, shows whether it was.
    """
    random = torch.Generator().manual_seed(0)
    u = torch.rand(outputs.shape, generator=random, dtype=torch.float64).to(outputs)
    difference = product(u) - multiply_by(hessian)(u)
    tolerance = torch.finfo(hessian.dtype).eps ** 0.5 * hessian.abs().sum(dim=2).amax()
    if bool((difference.abs() > tolerance).any()):
        raise UnsupportedLossError(
            "the criterion couples the data of a batch (its second derivative by the outputs of "
            "two different data is not zero), so it is no sum over data and has no Hessian a "
            "datum; use a criterion that is a sum or a mean over data, or exact.hessian"
        )
