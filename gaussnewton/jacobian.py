"""J v, Jᵀ r and Ḡ v, from what one forward pass recorded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.again import Repeat
from gaussnewton.chain import Chain
from gaussnewton.network import Network
from gaussnewton.tangents import pull_back, push

Directions = Mapping[str, Float[Tensor, "k rows columns"]]
"""For each layer, k directions of its matrix ``[W | b]``."""


Differentiable = Chain | Network | Repeat
"""A forward pass that products with its Jacobian can be had of; of a network the pass will do."""


def jacobian_product(
    chain: Differentiable, directions: Directions, part: slice = slice(None)
) -> Float[Tensor, "k n d"]:
    """J v for k directions of all layers at once (the R-operator of appendix B.2).

    Tangents go forward through the recorded layers and segments; nothing is evaluated a
    second time.

    Args:
        chain: the layers; of a network that is no chain autograd does it.
        directions: one stack for each trained layer.
        part: the data to answer for.
    """
    if not isinstance(chain, Chain):
        return push(_repeated(chain), _one_by_one(directions), part)
    tangent: Tensor | None = None
    for link in reversed(chain.links):
        call, moved = link.call, None
        if link.trained:
            moved = link.rule.push(call.module, directions[call.name], call.unspoiled_input()[part])
        if tangent is not None:
            moved = link.rule.push_rows(call.module, tangent, moved)
        assert moved is not None  # the chain ends at its first trained layer
        tangent = link.segment.push(moved, part)
    assert tangent is not None
    return tangent


def layer_jacobian_products(
    chain: Differentiable, directions: Mapping[str, Float[Tensor, "_ _"]], part: slice = slice(None)
) -> Float[Tensor, "layers n d"]:
    """J_λ v_λ of each trained layer by itself, the first layer first.

    Their sum is J v, and any weighting of the layers is a weighted sum of them.
    """
    if not isinstance(chain, Chain):
        repeat = _repeated(chain)
        return push(repeat, _each_alone(repeat, directions), part)
    tangents: Tensor | None = None
    for link in reversed(chain.links):
        call = link.call
        moved = None if tangents is None else link.rule.push_rows(call.module, tangents)
        if link.trained:
            V = directions[call.name].unsqueeze(0)
            own = link.rule.push(call.module, V, call.unspoiled_input()[part])
            moved = own if moved is None else torch.cat([moved, own])
        assert moved is not None
        tangents = link.segment.push(moved, part)
    assert tangents is not None
    return tangents


def jacobian_products(
    chain: Differentiable,
    layers: Mapping[str, Float[Tensor, "_ _"]] | None,
    others: Directions | None,
    part: slice = slice(None),
) -> Float[Tensor, "m n d"]:
    """Both of the above, one after the other; in a network by one pass."""
    if not isinstance(chain, Chain):
        repeat = _repeated(chain)
        each = [] if layers is None else _each_alone(repeat, layers)
        return push(repeat, each + ([] if others is None else _one_by_one(others)), part)
    tangents = []
    if layers is not None:
        tangents.append(layer_jacobian_products(chain, layers, part))
    if others is not None:
        tangents.append(jacobian_product(chain, others, part))
    return torch.cat(tangents) if len(tangents) > 1 else tangents[0]


def _repeated(network: Network | Repeat) -> Repeat:
    return network.repeat if isinstance(network, Network) else network


def _each_alone(
    repeat: Repeat, directions: Mapping[str, Float[Tensor, "_ _"]]
) -> list[dict[str, Float[Tensor, "_ _"]]]:
    return [{name: directions[name]} for name in repeat.outline.theta.groups]


def _one_by_one(directions: Directions) -> list[dict[str, Float[Tensor, "_ _"]]]:
    count = len(next(iter(directions.values())))
    return [{name: V[k] for name, V in directions.items()} for k in range(count)]


def transposed_product(
    chain: Chain | Network, rows: Float[Tensor, "n d"]
) -> dict[str, Float[Tensor, "_ _"]]:
    """Jᵀ r: what vectors at the outputs pull on each layer's matrix ``[W | b]``."""
    if isinstance(chain, Network):
        return pull_back(chain.repeat, rows)
    result = {}
    for link in chain:
        call = link.call
        rows = link.segment.pull_rows(rows)
        if link.trained:
            result[call.name] = rows.T @ link.rule.rows(call.module, call.unspoiled_input())
        if link is not chain.links[-1]:
            rows = link.rule.pull_rows(call.module, rows)
    return result


def gauss_newton_product(
    chain: Chain | Network, direction: Mapping[str, Float[Tensor, "_ _"]]
) -> dict[str, Float[Tensor, "_ _"]]:
    """Ḡ v = Σ_n J_nᵀ 𝓗_L J_n v, from what one forward pass recorded."""
    record = chain.record
    tangent = jacobian_product(chain, {name: V.unsqueeze(0) for name, V in direction.items()})[0]
    return transposed_product(chain, record.geometry.hessian(*record.wide).product(tangent))
