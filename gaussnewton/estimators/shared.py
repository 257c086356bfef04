"""Kronecker factors of layers that use their weights many times (Eschenhagen et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks import (
    Block,
    DenseBlock,
    DiagonalBlock,
    GroupedBlock,
    KroneckerBlock,
    ScaledBlock,
)
from gaussnewton.blocks.joining import zero_block
from gaussnewton.blocks.nearest import nearest_kronecker
from gaussnewton.gram import gram
from gaussnewton.layers import MatrixRule, SmallRule, TableRule
from gaussnewton.network import Network, family
from gaussnewton.parameters import Group
from gaussnewton.tape import LayerCall

Sharing = Literal["expand", "reduce"]
"""What the positions of a datum are taken for.

"expand": data of their own, so that Q averages over data and positions and G sums over both.
Exact for a deep linear network whose loss adds up positions, as that of a language model does.

"reduce": parts of one vector: a is averaged over positions and its gradient summed. Exact for a
deep linear network that averages over positions before the loss, as an image classifier does.
"""


Family = tuple[type, int | None]
"""Calls that add up to one Kronecker product; see :func:`~gaussnewton.network.family`."""

DENSE = 512
"""Layers with few parameters have their block written out up to so many, else its diagonal."""


def shared_blocks(
    network: Network,
    roots: Float[Tensor, "n k d"],
    sharing: Sharing,
    workspace: int,
    independent: bool = False,
) -> dict[str, Block]:
    """One block for each group of parameters, from vectors at the outputs.

    Args:
        network: the layers' calls.
        roots: for each datum k vectors r with Σ r rᵀ its matrix at the outputs.
        sharing: how positions are taken.
        workspace: about how many bytes the vectors on their way back may take.
        independent: whether the vectors of different data are independent and zero on average,
            so that those of all data may be sent back to a loose parameter at once.
    """
    sums: dict[tuple[str, Family], Tensor] = {}
    loose: dict[str, Tensor] = {}
    entries = sum(call.shape.numel() for calls in network.calls.values() for call in calls)
    step = max(1, workspace // max(1, entries * roots.element_size()))
    for part in roots.transpose(0, 1).split(step):
        gathered: dict[tuple[str, Family], list[Tensor]] = {}
        for call, rows in network.gradients(part):
            gathered.setdefault((call.name, family(call)), []).append(_sorted_rows(call, rows))
        for key, found in gathered.items():
            total = _moment(network, key, found, sharing)
            sums[key] = sums[key] + total if key in sums else total
        for name, total in _loose_moments(network, part, independent, workspace):
            loose[name] = loose[name] + total if name in loose else total
    return {
        group.name: DiagonalBlock(loose[group.name].reshape(group.columns, group.rows).T)
        if group.name in loose
        else _block(network, group, sums, sharing)
        for group in network.record.theta
    }


def _moment(
    network: Network, key: tuple[str, Family], found: list[Tensor], sharing: Sharing
) -> Tensor:
    """The second moment of what came back to the calls of one family."""
    if issubclass(key[1][0], SmallRule):
        return _small_moment(network.record.theta[key[0]], found)
    return _gradient_moment(found, sharing)


def _loose_moments(
    network: Network, rows: Float[Tensor, "k n d"], independent: bool, workspace: int
) -> Iterator[tuple[str, Float[Tensor, " size"]]]:
    """The diagonal of the block of each loose group: the squared gradients of the data.

    Exact, and costly, as it takes a backward pass for each datum; or, of independent vectors with
    mean zero, in expectation, from one pass for all.
    """
    if not network.loose:
        return
    names = sorted(network.loose)
    each = sum(call.shape.numel() for call in network.record.calls) * rows.element_size()
    step = len(rows) if independent else max(1, workspace // max(1, each) // rows.shape[1])
    for part in rows.split(max(1, step)):
        for name, found in network.parameter_gradients(part, names, together=independent):
            yield name, found.square().sum(0)


def _sorted_rows(call: LayerCall, rows: Float[Tensor, "k n *out"]) -> Tensor:
    """By positions and groups, or, of a layer with few parameters, by parameters."""
    if isinstance(call.rule, SmallRule):
        return call.rule.parameter_rows(call.module, call.unspoiled_input(), rows)
    if isinstance(call.rule, TableRule):  # one group
        return call.rule.gradients(call.module, call.unspoiled_input(), rows).unsqueeze(3)
    return _matrix_rule(call).gradients(call.module, rows)


def _matrix_rule(call: LayerCall) -> MatrixRule:
    assert isinstance(call.rule, MatrixRule)
    return call.rule


def _small_moment(group: Group, found: list[Float[Tensor, "k n size"]]) -> Tensor:
    """Σ v vᵀ over vectors and data, v being summed over calls; only the diagonal of large ones."""
    v = torch.stack(found).sum(0).flatten(0, 1)
    by_column = v.reshape(len(v), group.rows, group.columns).mT.flatten(1)
    return gram(by_column) if group.size <= DENSE else by_column.square().sum(0)


def _small_block(group: Group, moment: Tensor) -> Block:
    """Exact: of one datum and one vector nothing is taken for independent of anything."""
    if moment.ndim == 1:
        return DiagonalBlock(moment.reshape(group.columns, group.rows).T)
    return DenseBlock(moment, group.rows, group.columns)


def _gradient_moment(
    found: list[Float[Tensor, "k n r groups out"]], sharing: Sharing
) -> Float[Tensor, "groups out out"]:
    """G of each group: the sum of g gᵀ over vectors, data and positions, or of (Σ g)(Σ g)ᵀ."""
    if sharing == "reduce":
        found = [torch.stack([rows.sum(2, keepdim=True) for rows in found]).sum(0)]
    rows = torch.cat([part.flatten(0, 2) for part in found])
    return torch.stack([gram(rows[:, group]) for group in range(rows.shape[1])])


def _input_moment(
    group: Group, calls: list[LayerCall], sharing: Sharing
) -> Float[Tensor, "groups columns columns"]:
    """Q of each group: the mean of a aᵀ over data and positions, or of the mean a over data."""
    found = [_positions(group, call) for call in calls]
    if sharing == "reduce":
        count = sum(part.shape[1] for part in found)
        found = [torch.stack([part.sum(1, keepdim=True) for part in found]).sum(0) / count]
    a = torch.cat([part.flatten(0, 1) for part in found])
    return torch.stack([gram(a[:, i], 1 / len(a)) for i in range(a.shape[1])])


def _positions(group: Group, call: LayerCall) -> Float[Tensor, "n r groups columns"]:
    rule = _matrix_rule(call)
    a = rule.positions(call.module, call.unspoiled_input())
    missing = not rule.transposed and a.shape[3] == group.columns - 1
    # A tied weight without the bias of the layer that owns both.
    return torch.cat([a, torch.zeros_like(a[..., :1])], dim=3) if missing else a


def _table_block(calls: list[LayerCall], M: Float[Tensor, "columns columns"]) -> ScaledBlock:
    """The rows' uses are counted as Q is averaged: over all positions of all calls."""
    positions = sum(call.input.numel() for call in calls)
    f: Tensor | float = 0.0
    for call in calls:
        assert isinstance(call.rule, TableRule)
        share = call.input.numel() / positions
        f = f + share * call.rule.uses(call.module, call.unspoiled_input())
    assert isinstance(f, Tensor)
    return ScaledBlock(f.to(M.dtype), M)


def _block(
    network: Network, group: Group, sums: dict[tuple[str, Family], Tensor], sharing: Sharing
) -> Block:
    """The block of a group from what came back to its calls."""
    calls: dict[Family, list[LayerCall]] = {}
    for call in network.calls[group.name]:
        if (group.name, family(call)) in sums:
            calls.setdefault(family(call), []).append(call)
    found = {kind: sums[group.name, kind] for kind in calls}
    if not calls:
        return zero_block(group.rows, group.columns, next(iter(group.parameters.values())))
    if any(issubclass(kind[0], SmallRule) for kind in calls):
        return _small_block(group, torch.stack(list(found.values())).sum(0))
    blocks = {kind: _matrix_block(group, own, found[kind], sharing) for kind, own in calls.items()}
    if any(kind[1] is not None for kind in calls):
        return _side_by_side(blocks)
    first, *others = blocks.values()
    return nearest_kronecker([first, *others]) if others else first


def _matrix_block(group: Group, calls: list[LayerCall], G: Tensor, sharing: Sharing) -> Block:
    """Of calls of one family."""
    if isinstance(calls[0].rule, TableRule):
        return _table_block(calls, G[0])
    transposed = _matrix_rule(calls[0]).transposed
    Q = _input_moment(group, calls, sharing)
    if transposed:
        Q, G = G, Q
    return KroneckerBlock(Q[0], G[0]) if len(Q) == 1 else GroupedBlock.of(Q, G)


def _side_by_side(blocks: dict[Family, Block]) -> Block:
    """The matrices that are one below the other, each with its own block."""
    parts = {kind[1] or 0: block for kind, block in blocks.items()}
    return GroupedBlock(tuple(cast(KroneckerBlock, parts[i]) for i in sorted(parts)))
