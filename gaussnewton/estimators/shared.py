"""Kronecker factors of layers that use their weights many times (Eschenhagen et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gaussnewton.blocks import (
    Block,
    DenseBlock,
    DiagonalBlock,
    GroupedBlock,
    KroneckerBlock,
    ScaledBlock,
    TiledBlock,
    of_factors,
)
from gaussnewton.blocks.joining import zero_block
from gaussnewton.blocks.nearest import nearest_kronecker
from gaussnewton.estimators.corrected import Gradients, corrected_network
from gaussnewton.estimators.eigenvalues import Eigenvalues
from gaussnewton.estimators.sharing import Sharing, Sharings, check_names, sharing_of
from gaussnewton.gram import gram
from gaussnewton.layers import MatrixRule, SmallRule, TableRule
from gaussnewton.network import WORKSPACE, Network, family
from gaussnewton.parameters import Group
from gaussnewton.tape import LayerCall
from gaussnewton.tiles import tiled_each, tiled_gram

Family = tuple[type, int | None]
"""Calls that add up to one Kronecker product; see :func:`~gaussnewton.network.family`."""

Key = tuple[str, Family]
"""A group of parameters, and a family of its calls."""

DENSE = 512
"""Layers with few parameters have their block written out up to so many, else its diagonal."""


def shared_blocks(
    network: Network,
    roots: Float[Tensor, "n k d"],
    sharing: Sharings,
    workspace: int,
    eigenvalues: Eigenvalues = "factored",
    independent: bool = False,
    largest: int | None = None,
) -> dict[str, Block]:
    """One block for each group of parameters, from vectors at the outputs.

    Args:
        network: the layers' calls.
        roots: for each datum k vectors r with Σ r rᵀ its matrix at the outputs.
        sharing: how positions are taken.
        workspace: about how many bytes the vectors on their way back may take, and the positions
            that Q is the moment of.
        eigenvalues: of Kronecker blocks.
        independent: whether the vectors of different data are independent and zero on average,
            so that those of all data may be sent back to a loose parameter at once.
        largest: the width of tiles that wider factors are cut to.
    """
    check_names(sharing, network.record.theta)
    sums: dict[Key, Tensor] = {}
    loose: dict[str, Tensor] = {}
    parts = roots.transpose(0, 1).split(network.rows_at_once(workspace))
    kept: list[Gradients] = []  # where all vectors go back together
    for part in parts:
        gradients: Iterable[tuple[LayerCall, Tensor]] = network.gradients(part)
        if eigenvalues == "corrected" and len(parts) == 1:
            kept = [gradients := list(gradients)]
        for key, moment in _moments_back(network, gradients, sharing, largest):
            _add(sums, key, moment)
        for name, moment in _loose_moments(network, part, independent, workspace):
            _add(loose, name, moment)
    result = {
        group.name: DiagonalBlock(loose[group.name].reshape(group.columns, group.rows).T)
        if group.name in loose
        else _block(network, group, sums, sharing_of(sharing, group), workspace, largest)
        for group in network.record.theta
    }
    if eigenvalues == "factored":
        return result
    passes = kept or (list(network.gradients(part)) for part in parts)
    return corrected_network(network, result, passes, workspace)


def _moments_back(
    network: Network,
    gradients: Iterable[tuple[LayerCall, Tensor]],
    sharing: Sharings,
    largest: int | None,
) -> Iterator[tuple[Key, Tensor]]:
    """The second moments of what comes back to the calls of each family."""
    gathered: dict[Key, list[Tensor]] = {}
    for call, found in gradients:
        key = call.name, family(call)
        expand = sharing_of(sharing, network.record.theta[call.name]) == "expand"
        if expand and isinstance(call.rule, MatrixRule):
            yield key, call.rule.gradient_moment(call.module, found, largest)
        else:  # what is summed over calls before it is squared
            gathered.setdefault(key, []).append(_sorted_rows(call, found))
    for key, parts in gathered.items():
        small = issubclass(key[1][0], SmallRule)
        group = network.record.theta[key[0]]
        if small:
            yield key, _small_moment(group, parts)
        else:
            yield key, _gradient_moment(parts, sharing_of(sharing, group), largest)


def _add(sums: dict[Any, Tensor], key: Any, term: Tensor) -> None:
    sums[key] = sums[key].add_(term) if key in sums else term


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
    found: list[Float[Tensor, "k n r groups out"]], sharing: Sharing, largest: int | None
) -> Float[Tensor, "groups out b"]:
    """G of each group: the sum of g gᵀ over vectors, data and positions, or of (Σ g)(Σ g)ᵀ."""
    if sharing == "reduce":
        found = [torch.stack([rows.sum(2, keepdim=True) for rows in found]).sum(0)]
    total: Tensor | None = None
    for part in found:  # one call after another: putting them together would copy them
        rows = part.flatten(0, 2)
        each = [tiled_gram(rows[:, group], largest) for group in range(rows.shape[1])]
        moment = torch.stack(each)
        total = moment if total is None else total.add_(moment)
    assert total is not None  # a layer without a call has no rows
    return total


def _input_moment(
    group: Group, calls: list[LayerCall], sharing: Sharing, workspace: int, largest: int | None
) -> Float[Tensor, "groups columns b"]:
    """Q of each group: the mean of a aᵀ over data and positions, or of the mean a over data."""
    total: Tensor | None = None
    count = 0
    for inputs in _input_parts(calls, sharing, workspace):
        pairs = list(zip(calls, inputs, strict=True))
        found: Iterable[tuple[Tensor, int]] = (
            [_reduced_moment(group, pairs, largest)]
            if sharing == "reduce"
            else _moments(group, pairs, largest)
        )
        for moment, number in found:
            total = moment if total is None else total.add_(moment)
            count += number
    assert total is not None
    return total.div_(count)


def _moments(
    group: Group, pairs: list[tuple[LayerCall, Tensor]], largest: int | None
) -> Iterator[tuple[Tensor, int]]:
    for call, input in pairs:
        rule = _matrix_rule(call)
        moment, number = rule.second_moment(call.module, input, largest)
        (missing,) = _missing(group, call, moment.shape[1])
        if missing:  # with another column the tiles would be others
            moment, number = rule.second_moment(call.module, input)
            moment = tiled_each(F.pad(moment, (0, missing) * 2), largest)
        yield moment, number


def _missing(group: Group, call: LayerCall, columns: int) -> tuple[int]:
    """How many columns a tied weight leaves out: the bias of the layer that owns both."""
    transposed = _matrix_rule(call).transposed
    return (int(not transposed and columns == group.columns - 1),)


def _reduced_moment(
    group: Group, pairs: list[tuple[LayerCall, Tensor]], largest: int | None
) -> tuple[Tensor, int]:
    """Of the mean a of each datum, over the positions of all calls."""
    found = [_matrix_rule(call).positions(call.module, input) for call, input in pairs]
    found = [
        F.pad(part, (0, *_missing(group, call, part.shape[-1])))
        for part, (call, _) in zip(found, pairs, strict=True)
    ]
    count = sum(part.shape[1] for part in found)
    a = torch.stack([part.sum(1) for part in found]).sum(0) / count
    return torch.stack([tiled_gram(a[:, i], largest) for i in range(a.shape[1])]), len(a)


def _input_parts(
    calls: list[LayerCall], sharing: Sharing, workspace: int
) -> Iterator[list[Tensor]]:
    """The inputs of all calls, of so many data at a time that what is written of them fits."""
    inputs = [call.unspoiled_input() for call in calls]
    data = len(inputs[0])
    if any(len(x) != data for x in inputs) or any(
        len(x) != call.shape[0] for x, call in zip(inputs, calls, strict=True)
    ):
        yield inputs  # rows of their own, or one image alone, without a dimension for data
        return
    wide = max(4, inputs[0].element_size())
    entries = [_entries(call, sharing) for call in calls]
    together = sum(entries) if sharing == "reduce" else max(entries)
    step = max(1, workspace // max(1, together * wide))
    for start in range(0, data, step):
        yield [x[start : start + step] for x in inputs]


def _entries(call: LayerCall, sharing: Sharing) -> int:
    """How many numbers are written of one datum."""
    rule = _matrix_rule(call)
    if sharing == "reduce":  # all positions, without and then with the bias's column
        return 2 * rule.positions(call.module, call.input[:1]).numel()
    return rule.moment_entries(call.module, call.input)


def _table_block(calls: list[LayerCall], M: Float[Tensor, "columns b"]) -> Block:
    """The rows' uses are counted as Q is averaged: over all positions of all calls."""
    positions = sum(call.input.numel() for call in calls)
    f: Tensor | float = 0.0
    for call in calls:
        assert isinstance(call.rule, TableRule)
        share = call.input.numel() / positions
        f = f + share * call.rule.uses(call.module, call.unspoiled_input())
    assert isinstance(f, Tensor)
    if M.shape[0] > M.shape[1]:
        return TiledBlock(M, f.to(M.dtype).unsqueeze(1))
    return ScaledBlock(f.to(M.dtype), M)


def _block(
    network: Network,
    group: Group,
    sums: dict[Key, Tensor],
    sharing: Sharing,
    workspace: int,
    largest: int | None,
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
    blocks = {
        kind: _matrix_block(group, own, found[kind], sharing, workspace, largest)
        for kind, own in calls.items()
    }
    if any(kind[1] is not None for kind in calls):
        return _side_by_side(blocks)
    first, *others = blocks.values()
    return nearest_kronecker([first, *others]) if others else first


def _matrix_block(
    group: Group,
    calls: list[LayerCall],
    G: Tensor,
    sharing: Sharing,
    workspace: int,
    largest: int | None,
) -> Block:
    """Of calls of one family."""
    if isinstance(calls[0].rule, TableRule):
        return _table_block(calls, G[0])
    transposed = _matrix_rule(calls[0]).transposed
    Q = _input_moment(group, calls, sharing, workspace, largest)
    if transposed:
        Q, G = G, Q
    return of_factors(Q[0], G[0]) if len(Q) == 1 else GroupedBlock.of(Q, G)


def _side_by_side(blocks: dict[Family, Block]) -> Block:
    """The matrices that are one below the other, each with its own block."""
    parts = {kind[1] or 0: block for kind, block in blocks.items()}
    return GroupedBlock(tuple(cast(KroneckerBlock, parts[i]) for i in sorted(parts)))


def factored_block(
    group: Group,
    calls: list[LayerCall],
    G: Float[Tensor, "groups out b"],
    sharing: Sharing,
    largest: int | None = None,
) -> Block:
    """The block of a group with a matrix or a table, whose G is known, in tiles of a limit."""
    return _matrix_block(group, calls, G, sharing, WORKSPACE, largest)
