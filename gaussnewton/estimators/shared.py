"""Kronecker factors of layers that use their weights many times (Eschenhagen et al. 2023)."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gaussnewton.blocks import (
    Block,
    DenseBlock,
    DiagonalBlock,
    GroupedBlock,
    KroneckerBlock,
    ScaledBlock,
)
from gaussnewton.gram import gram
from gaussnewton.layers import MatrixRule, SmallRule, TableRule, rule_for
from gaussnewton.network import Network
from gaussnewton.parameters import Group
from gaussnewton.tape import LayerCall

Sharing = Literal["expand", "reduce"]
"""What the positions of a datum are taken for.

"expand": data of their own, so that Q averages over data and positions and G sums over both.
Exact for a deep linear network whose loss adds up positions, as that of a language model does.

"reduce": parts of one vector: a is averaged over positions and its gradient summed. Exact for a
deep linear network that averages over positions before the loss, as an image classifier does.
"""


DENSE = 512
"""Layers with few parameters have their block written out up to so many, else its diagonal."""


def shared_blocks(
    network: Network, roots: Float[Tensor, "n k d"], sharing: Sharing, workspace: int
) -> dict[str, Block]:
    """One block for each trained layer, from vectors at the outputs.

    Args:
        network: the layers' calls.
        roots: for each datum k vectors r with Σ r rᵀ its matrix at the outputs.
        sharing: how positions are taken.
        workspace: about how many bytes the vectors on their way back may take.
    """
    sums: dict[str, Tensor] = {}
    small = {name for name, calls in network.calls.items() if _is_small(calls)}
    entries = sum(call.shape.numel() for calls in network.calls.values() for call in calls)
    step = max(1, workspace // max(1, entries * roots.element_size()))
    for part in roots.transpose(0, 1).split(step):
        gathered: dict[str, list[Tensor]] = {}
        for call, rows in network.gradients(part):
            gathered.setdefault(call.name, []).append(_sorted_rows(call, rows))
        for name, found in gathered.items():
            total = _small_moment(found) if name in small else _gradient_moment(found, sharing)
            sums[name] = sums[name] + total if name in sums else total
    result: dict[str, Block] = {}
    for group in network.record.theta:
        name, calls = group.name, network.calls[group.name]
        if name not in sums:
            result[name] = empty_block(network.record.modules[name], group)
        elif name in small:
            result[name] = _small_block(group, sums[name])
        else:
            result[name] = _block(calls, sums[name], sharing)
    return result


def _is_small(calls: list[LayerCall]) -> bool:
    return bool(calls) and isinstance(calls[0].rule, SmallRule)


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


def _small_moment(found: list[Float[Tensor, "k n size"]]) -> Tensor:
    """Σ v vᵀ over vectors and data, v being summed over calls; only the diagonal of large ones."""
    v = torch.stack(found).sum(0).flatten(0, 1)
    return gram(v) if v.shape[1] <= DENSE else v.square().sum(0)


def _small_block(group: Group, moment: Tensor) -> Block:
    """Exact: of one datum and one vector nothing is taken for independent of anything."""
    if moment.ndim == 1:
        return DiagonalBlock(moment.reshape(group.rows, group.columns))
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
    calls: list[LayerCall], sharing: Sharing
) -> Float[Tensor, "groups columns columns"]:
    """Q of each group: the mean of a aᵀ over data and positions, or of the mean a over data."""
    found = [_matrix_rule(call).positions(call.module, call.unspoiled_input()) for call in calls]
    if sharing == "reduce":
        count = sum(part.shape[1] for part in found)
        found = [torch.stack([part.sum(1, keepdim=True) for part in found]).sum(0) / count]
    a = torch.cat([part.flatten(0, 1) for part in found])
    return torch.stack([gram(a[:, group], 1 / len(a)) for group in range(a.shape[1])])


def _table_block(calls: list[LayerCall], M: Float[Tensor, "columns columns"]) -> Block:
    """The rows' uses are counted as Q is averaged: over all positions of all calls."""
    positions = sum(call.input.numel() for call in calls)
    f: Tensor | float = 0.0
    for call in calls:
        assert isinstance(call.rule, TableRule)
        share = call.input.numel() / positions
        f = f + share * call.rule.uses(call.module, call.unspoiled_input())
    assert isinstance(f, Tensor)
    return ScaledBlock(f.to(M.dtype), M)


def empty_block(module: nn.Module, group: Group, device: torch.device | str | None = None) -> Block:
    """The block of a layer that had no part in a pass: of its own kind, and zero.

    On the device "meta" it takes no memory, and still tells kind and sizes.
    """
    like, rule = next(iter(group.parameters.values())), rule_for(module)
    wide = torch.promote_types(like.dtype, torch.float32)

    def zeros(*size: int) -> Tensor:
        return torch.zeros(size, dtype=wide, device=like.device if device is None else device)

    rows, columns, groups = group.rows, group.columns, getattr(module, "groups", 1)
    if isinstance(rule, SmallRule):
        if group.size > DENSE:
            return DiagonalBlock(zeros(rows, columns))
        return DenseBlock(zeros(group.size, group.size), rows, columns)
    if isinstance(rule, TableRule):
        return ScaledBlock(zeros(rows), zeros(columns, columns))
    if groups == 1:
        return KroneckerBlock(zeros(columns, columns), zeros(rows, rows))
    each = rows // groups
    return GroupedBlock.of(zeros(groups, columns, columns), zeros(groups, each, each))


def _block(calls: list[LayerCall], G: Tensor, sharing: Sharing) -> Block:
    if isinstance(calls[0].rule, TableRule):
        return _table_block(calls, G[0])
    Q = _input_moment(calls, sharing)
    return KroneckerBlock(Q[0], G[0]) if len(Q) == 1 else GroupedBlock.of(Q, G)


def factored_block(
    calls: list[LayerCall], G: Float[Tensor, "groups out out"], sharing: Sharing
) -> Block:
    """The block of a layer with a matrix or a table, whose G is known."""
    return _block(calls, G, sharing)
