"""From expected matrices at the outputs of layers to their blocks."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.blocks import Block, DenseBlock, DiagonalBlock
from gaussnewton.blocks.joining import zero_block
from gaussnewton.errors import UnsupportedGraphError
from gaussnewton.estimators.expected.layout import Layout
from gaussnewton.estimators.expected.recursion import Expected
from gaussnewton.estimators.shared import DENSE, factored_block
from gaussnewton.estimators.sharing import Sharing, Sharings, check_names, sharing_of
from gaussnewton.layers import ConvolutionRule, LinearRule, NormalisationRule, TableRule
from gaussnewton.layers.normalisation import BY_ENTRY, normalised
from gaussnewton.network import Network, family
from gaussnewton.parameters import Group
from gaussnewton.precision import widened
from gaussnewton.tape import LayerCall
from gaussnewton.tiles import tiled_each

_KNOWN = (LinearRule, ConvolutionRule, TableRule, NormalisationRule)


def expected_blocks(
    network: Network,
    found: list[tuple[LayerCall, Expected]],
    sharing: Sharings,
    largest: int | None = None,
) -> dict[str, Block]:
    """One block for each trained layer, of the kind that the other estimators give it."""
    check_names(sharing, network.record.theta)
    by_name: dict[str, list[tuple[LayerCall, Expected]]] = {}
    for call, expected in found:
        by_name.setdefault(call.name, []).append((call, expected))
    result: dict[str, Block] = {}
    for group in network.record.theta:
        own = by_name.get(group.name, [])
        if not own and network.calls[group.name]:
            raise UnsupportedGraphError(
                f"KFRA has not come back to '{group.name}': the first dimension of what it "
                "returns does not count the data. Put the data first, or use 'kflr' or 'kfac'."
            )
        if not own:
            like = next(iter(group.parameters.values()))
            result[group.name] = zero_block(group.rows, group.columns, like)
        elif isinstance(own[0][0].rule, NormalisationRule):
            result[group.name] = _normalising_block(group, own)
        else:
            way = sharing_of(sharing, group)
            factors = [_factor(call, expected, way) for call, expected in own]
            G = tiled_each(torch.stack(factors).sum(0), largest)
            calls = [call for call, _ in own]
            result[group.name] = factored_block(group, calls, G, way, largest)
    return result


def refuse_unknown(network: Network) -> None:
    """Raise where parameters are used in a way that has no block here."""
    for group in network.record.theta:
        calls = network.calls[group.name]
        if group.name in network.loose:
            raise UnsupportedGraphError(
                f"KFRA goes back from layer to layer, and '{group.name}' is used outside of the "
                "calls that it understands. Use 'kflr' or 'kfac'."
            )
        if calls and not _is_known(calls):
            module = calls[0].module
            user = type(module).__name__ if isinstance(module, nn.Module) else "functions"
            raise UnsupportedGraphError(
                f"KFRA does not know the block of '{group.name}', as it is used by {user}. Use "
                "'kflr' or 'kfac'."
            )


def _is_known(calls: list[LayerCall]) -> bool:
    """Whether all are of one kind that has a block here."""
    alike = len({family(call) for call in calls}) == 1 and calls[0].part is None
    return alike and isinstance(calls[0].rule, _KNOWN)


def _factor(
    call: LayerCall, expected: Expected, sharing: Sharing
) -> Float[Tensor, "groups out out"]:
    """G of each group of channels: summed over positions, or over pairs of them."""
    shape = expected.layout.shape
    channels = (0,) if isinstance(call.rule, ConvolutionRule) else (len(shape) - 1,)
    S = expected.summed(Layout(shape, channels))[sharing == "reduce"]
    padding = getattr(call.module, "padding_idx", None)
    if isinstance(call.rule, TableRule) and padding is not None:
        S = S * (call.input != padding).to(S).mean()
    groups = int(getattr(call.module, "groups", 1))
    size = S.shape[0] // groups
    return torch.stack([S[i : i + size, i : i + size] for i in range(0, S.shape[0], size)])


def _normalising_block(group: Group, own: list[tuple[LayerCall, Expected]]) -> Block:
    total: Tensor | float = 0.0
    for call, expected in own:
        total = total + _small_moment(call, expected)
    assert isinstance(total, Tensor)
    if group.size <= DENSE:
        return DenseBlock(total, group.rows, group.columns)
    return DiagonalBlock(total.diagonal().reshape(group.columns, group.rows).mT.contiguous())


def _small_moment(call: LayerCall, expected: Expected) -> Float[Tensor, "size size"]:
    r"""For y = w ⊙ x̂ + b: :math:`\sum_{pq} M[y_p, y_q] ⊙ E[[x̂_p; 1][x̂_q; 1]^T]`.

    As if x̂ and the gradient did not know of each other, but for the slope of an elementwise
    function behind the layer, which knows a lot of x̂: there M is taken behind it, and s ⊙ x̂ and s
    instead of x̂ and 1. Summed over the entries that one parameter serves.
    """
    module: Any = call.module
    (D, B), layout = expected.parts, expected.layout
    slope: Tensor | float = 1.0
    if expected.behind is not None:
        (D, B), slope = expected.behind
    hat = widened(layout.gather(normalised(module, call.unspoiled_input()))).to(D)
    owner = layout.gather(_owners(module, layout.shape))[0].to(D.device)
    trained = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
    factors = [slope * (hat if name == "weight" else torch.ones_like(hat)) for name in trained]
    n, size = len(hat), int(owner.max()) + 1
    result = D.new_zeros(len(factors) * size, len(factors) * size)
    for i, left in enumerate(factors):
        for j, right in enumerate(factors):
            part = D * (left.flatten(0, 1).mT @ right.flatten(0, 1) / n)
            if layout.positions > 1:
                part = part + B * (left.sum(1).mT @ right.sum(1) / n)
            at = result[i * size : (i + 1) * size, j * size : (j + 1) * size]
            at.index_put_((owner.unsqueeze(1), owner.unsqueeze(0)), part, accumulate=True)
    return result


def _owners(module: Any, shape: tuple[int, ...]) -> Tensor:
    """For each entry of a datum, which entry of w it is multiplied by."""
    if isinstance(module, BY_ENTRY):
        tail = tuple(module.normalized_shape)
        return torch.arange(torch.Size(tail).numel()).reshape(tail).expand(shape)
    return torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)).expand(shape)
