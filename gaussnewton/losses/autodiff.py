"""The derivatives of any criterion at the outputs, by automatic differentiation."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.errors import UnsupportedLossError
from gaussnewton.losses.geometry import Geometry
from gaussnewton.probe import datum_matrices, diagonal_of, keeps_data_apart


def output_derivatives(
    geometry: Geometry, outputs: Tensor, targets: Any
) -> tuple[Tensor, Float[Tensor, "n d"]]:
    """𝓗_L of each datum as it is, PSD or not, and the gradient at the outputs.

    Returns:
        The Hessians ``[n, d, d]``, or only their diagonals, ``[n, d]``, for a criterion that
        treats each output by itself; and the gradient.
    """
    h = outputs.detach().requires_grad_()
    with torch.enable_grad():
        (g,) = torch.autograd.grad(geometry.value(h, targets), h, create_graph=True)
    gradient = g.detach().flatten(1)
    if not g.requires_grad:  # the criterion is linear in the outputs
        return torch.zeros_like(gradient), gradient

    def product(v: Tensor) -> Tensor:
        return torch.autograd.grad(g, h, v, retain_graph=True, materialize_grads=True)[0]

    ours = isinstance(geometry.criterion, nn.modules.loss._Loss)  # torch's keep the data apart
    if not ours and not keeps_data_apart(product, h):
        raise UnsupportedLossError(
            f"{geometry.criterion} couples the data of a batch: its second derivative at the "
            "outputs of one datum depends on another's. Curvature needs a sum or mean of terms "
            "of one datum each."
        )
    diagonal = diagonal_of(product, h)
    if diagonal is not None:
        return diagonal.flatten(1), gradient
    H = datum_matrices(product, h)
    return (H + H.mT) / 2, gradient
