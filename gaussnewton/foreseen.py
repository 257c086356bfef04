"""Which block each group of parameters will get, before anything has been recorded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gaussnewton.blocks import (
    Block,
    DenseBlock,
    DiagonalBlock,
    EigenBlock,
    GroupedBlock,
    KroneckerBlock,
    ScaledBlock,
    bounded,
)
from gaussnewton.estimators.eigenvalues import Eigenvalues
from gaussnewton.estimators.shared import DENSE
from gaussnewton.layers.rule import SmallRule, TableRule
from gaussnewton.parameters import Group, Theta
from gaussnewton.tape import Layer, recorded_layers


@dataclass(frozen=True)
class Foreseen:
    """A block to come.

    Attributes:
        block: of the right kind and size, without numbers.
        fallback: why it is not what its layer type has a rule for; "" if it is.
    """

    block: Block
    fallback: str = ""


def foreseen_blocks(
    model: nn.Module,
    theta: Theta,
    eigenvalues: Eigenvalues = "factored",
    largest: int | None = None,
) -> dict[str, Foreseen]:
    """The block of each group, as far as the modules tell.

    Args:
        model: whose parameters.
        theta: those that are trained.
        eigenvalues: of Kronecker blocks.
        largest: the limit above which factors are cut to tiles.
    """
    layers = recorded_layers(model, theta)
    result = {
        group.name: _foreseen(
            group, model.get_submodule(group.module), [x for x in layers if x.name == group.name]
        )
        for group in theta
    }
    if eigenvalues == "corrected":
        result = {name: _corrected(foreseen) for name, foreseen in result.items()}
    return {
        name: Foreseen(bounded(foreseen.block, largest), foreseen.fallback)
        for name, foreseen in result.items()
    }


def _corrected(foreseen: Foreseen) -> Foreseen:
    """With eigenvalues of its own, if it is a Kronecker block of one use."""
    block = foreseen.block
    if isinstance(block, KroneckerBlock) and not foreseen.fallback:
        return Foreseen(_eigen(block))
    if isinstance(block, GroupedBlock):
        parts = tuple(_eigen(p) for p in block.parts if isinstance(p, KroneckerBlock))
        return Foreseen(GroupedBlock(parts), foreseen.fallback)
    return foreseen


def _eigen(block: KroneckerBlock) -> EigenBlock:
    values = block.Q.new_empty(block.rows, block.columns)
    return EigenBlock(block.Q, block.G, block.Q, block.G, values)


def _foreseen(group: Group, module: nn.Module, layers: list[Layer]) -> Foreseen:
    if len({type(layer.rule) for layer in layers}) > 1:
        names = " and ".join(type(layer.module).__name__ for layer in layers)
        return Foreseen(_kronecker(group), f"tied weights of {names}: nearest to the sum of both")
    if layers:
        return Foreseen(_by_rule(group, layers[0]))
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return Foreseen(_kronecker(group))
    if isinstance(module, nn.MultiheadAttention) and group.part.startswith("in_proj"):
        return Foreseen(_grouped(group, 3))
    if isinstance(module, nn.MultiheadAttention) and group.part.endswith("_proj_weight"):
        return Foreseen(_kronecker(group))
    reason = f"{type(module).__name__} has no rule: by how it uses the parameter"
    return Foreseen(_small(group), reason)


def _by_rule(group: Group, layer: Layer) -> Block:
    if isinstance(layer.rule, SmallRule):
        return _small(group)
    if isinstance(layer.rule, TableRule):
        return ScaledBlock(_empty(group, group.rows), _empty(group, group.columns, group.columns))
    groups = getattr(layer.module, "groups", 1)
    return _kronecker(group) if groups == 1 else _grouped(group, groups)


def _small(group: Group) -> Block:
    if group.size > DENSE:
        return DiagonalBlock(_empty(group, group.rows, group.columns))
    return DenseBlock(_empty(group, group.size, group.size), group.rows, group.columns)


def _kronecker(group: Group) -> Block:
    rows, columns = group.rows, group.columns
    return KroneckerBlock(_empty(group, columns, columns), _empty(group, rows, rows))


def _grouped(group: Group, count: int) -> Block:
    rows, columns = group.rows // count, group.columns
    return GroupedBlock.of(_empty(group, count, columns, columns), _empty(group, count, rows, rows))


def _empty(group: Group, *size: int) -> Tensor:
    like = next(iter(group.parameters.values()))
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(size, dtype=wide, device="meta")
