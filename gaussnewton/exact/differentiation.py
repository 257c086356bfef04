"""Derivatives by θ, flat and in the order of θ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.parameters import Group


def gradient(
    function: Float[Tensor, "*d"],
    groups: Sequence[Group],
    *,
    weights: Float[Tensor, "*d"] | None = None,
    create_graph: bool = False,
) -> Float[Tensor, " p"]:
    r"""The gradient :math:`J^T w` of :math:`w^T f(θ)` by the parameters of some groups.

    Args:
        function: The value :math:`f(θ)`, with its graph, which is kept.
        groups: The parts of θ, in order.
        weights: :math:`w`; 1 for a scalar function.
        create_graph: Whether the result can be differentiated again.
    """
    parameters = {key: p for group in groups for key, p in group.parameters.items()}
    if not function.requires_grad:
        zeros = {key: torch.zeros_like(p) for key, p in parameters.items()}
        return flatten(groups, zeros)
    derivatives = torch.autograd.grad(
        function,
        list(parameters.values()),
        weights,
        retain_graph=True,
        create_graph=create_graph,
        materialize_grads=True,
    )
    return flatten(groups, dict(zip(parameters, derivatives, strict=True)))


def flatten(groups: Sequence[Group], tensors: dict[str, Tensor]) -> Float[Tensor, " p"]:
    """Tensors shaped like the parameters of some groups, column by column, end to end."""
    return torch.cat([group.matrix(tensors).T.reshape(-1) for group in groups])
