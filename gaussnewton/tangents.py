"""J v and Jᵀ r of a network that is no chain, by running its pass once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.again import Repeat
from gaussnewton.network import WORKSPACE
from gaussnewton.precision import widened


def push(
    network: Repeat,
    directions: Sequence[Mapping[str, Float[Tensor, "_ _"]]],
    part: slice,
    workspace: int = WORKSPACE,
) -> Float[Tensor, "k n d"]:
    """J v of some directions, each of some layers, for the data of a part of the batch.

    Args:
        network: a pass that can be run again.
        directions: matrices of some layers; the others stay where they are.
        part: the data to answer for.
        workspace: about how many bytes may be taken at once, by as many data as fit.
    """
    tangents = [
        {
            key: tensor
            for name, matrix in direction.items()
            for key, tensor in network.outline.theta[name].tensors(matrix).items()
        }
        for direction in directions
    ]
    pieces = _pieces(network, part, workspace, len(tangents))
    return widened(torch.cat([_tangents(network, tangents, piece) for piece in pieces], dim=1))


def _pieces(network: Repeat, part: slice, workspace: int, count: int) -> list[slice]:
    """The data in parts whose tangents fit, where a part of them can be evaluated alone."""
    start, stop, step = part.indices(network.outline.data)
    if network.again.draws or step != 1 or not network.outline.apart:
        return [part]
    fit = max(1, workspace // max(1, network.outline.bytes_of(count)))
    return [slice(i, min(i + fit, stop)) for i in range(start, stop, fit)] or [part]


def _tangents(
    network: Repeat, directions: Sequence[Mapping[str, Tensor]], part: slice
) -> Float[Tensor, "k n d"]:
    """By forward mode where it is known to work, else by two backward passes."""
    if network.again.forward_mode.refused:
        return by_two_backwards(network, directions, part)
    whole = not network.outline.apart and part != slice(None)
    moved = network.again.forward(directions, slice(None) if whole else part)
    if moved is not None and whole:
        moved = moved[:, part]
    if moved is not None and network.again.forward_mode.trusted:
        return moved
    expected = by_two_backwards(network, directions, part)
    network.again.forward_mode.judge(moved, expected)
    return expected if moved is None or network.again.forward_mode.refused else moved


def by_two_backwards(
    network: Repeat, directions: Sequence[Mapping[str, Tensor]], part: slice
) -> Float[Tensor, "k n d"]:
    """As the derivative of u ↦ Jᵀ u, which is linear."""
    outputs = _outputs(network, part)
    with torch.enable_grad():
        u = torch.zeros_like(outputs, requires_grad=True)
        pulled = _parameter_gradients(network, outputs, u, create_graph=True)
        zero = torch.zeros_like(outputs).flatten(1)
    result = []
    for tangents in directions:
        used = [key for key in tangents if key in pulled]
        moved = None
        if used:
            (moved,) = torch.autograd.grad(
                [pulled[key] for key in used],
                [u],
                [tangents[key].to(u.dtype) for key in used],
                retain_graph=True,
                allow_unused=True,
            )
        result.append(zero if moved is None else moved.flatten(1))
    return torch.stack(result)


def pull_back(network: Repeat, rows: Float[Tensor, "n d"]) -> dict[str, Float[Tensor, "_ _"]]:
    """Jᵀ r: what vectors at the outputs pull on each layer's matrix ``[W | b]``."""
    outputs = _outputs(network, slice(None))
    pulled = _parameter_gradients(network, outputs, rows.to(outputs.dtype).reshape(outputs.shape))
    return {
        group.name: widened(
            group.matrix(
                {key: pulled.get(key, torch.zeros_like(p)) for key, p in group.parameters.items()}
            )
        )
        for group in network.outline.theta
    }


def _outputs(network: Repeat, part: slice) -> Tensor:
    whole = part.indices(network.outline.data) == (0, network.outline.data, 1)
    if whole or network.outline.apart:
        return network.again.outputs(part)
    with torch.enable_grad():  # where data are mixed, a part of them alone is another function
        return network.again.outputs(slice(None))[part]


def _parameter_gradients(
    network: Repeat, outputs: Tensor, v: Tensor, create_graph: bool = False
) -> dict[str, Tensor]:
    """Jᵀ v by parameter; without those that the outputs do not depend on."""
    named = {key: p for group in network.outline.theta for key, p in group.parameters.items()}
    found = torch.autograd.grad(
        [outputs], list(named.values()), [v], create_graph=create_graph, allow_unused=True
    )
    return {key: g for key, g in zip(named, found, strict=True) if g is not None}
