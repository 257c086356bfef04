"""Running averages of Q and G (section 5), and damped inverses that do not fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gaussnewton.blocks import (
    Block,
    DenseBlock,
    DiagonalBlock,
    GroupedBlock,
    Inverse,
    Inversion,
    KroneckerBlock,
    ScaledBlock,
)
from gaussnewton.errors import FactorisationError
from gaussnewton.estimators import Estimator
from gaussnewton.estimators.shared import DENSE
from gaussnewton.layers import SmallRule, TableRule, rule_for
from gaussnewton.observer import Observation
from gaussnewton.parameters import Group
from gaussnewton.progress import Progress

KEYS = ("Q", "G", "matrix", "D", "f", "M")
"""Under which a block's numbers are kept in a layer's state."""


def blocks_of(observations: Sequence[Observation], estimator: Estimator) -> dict[str, Block]:
    """The blocks of f, of all observed passes together."""
    result: dict[str, Block] = {}
    data = 0
    for observation in observations:
        assert observation.factor is not None
        factor, count = float(observation.factor), observation.record.data
        for name, block in estimator.of(observation.passage).items():
            if name not in result:
                result[name] = block.scaled(factor)
            elif _fit(result[name], block):
                result[name] = result[name].merge(block, (data, count), (1.0, factor))
        data += count
    return result


def kind_of(module: nn.Module, group: Group) -> str:
    """The kind of block that a layer gets, in words."""
    if isinstance(rule_for(module), SmallRule):
        return "dense" if group.size <= DENSE else "diagonal"
    if isinstance(rule_for(module), TableRule):
        return "Kronecker, one factor diagonal"
    groups = getattr(module, "groups", 1)
    return "Kronecker" if groups == 1 else f"Kronecker, {groups} groups"


def empty_numbers(module: nn.Module, group: Group) -> dict[str, Tensor]:
    """Zeros in place of what :func:`numbers` would return."""
    like, groups = next(iter(group.parameters.values())), getattr(module, "groups", 1)
    wide = torch.promote_types(like.dtype, torch.float32)
    known: dict[str, dict[str, tuple[int, ...]]] = {
        "dense": {"matrix": (group.size, group.size)},
        "diagonal": {"D": (group.rows, group.columns)},
        "Kronecker, one factor diagonal": {"f": (group.rows,), "M": (group.columns,) * 2},
        "Kronecker": {"Q": (group.columns,) * 2, "G": (group.rows,) * 2},
    }
    stacked = {"Q": (groups, *(group.columns,) * 2), "G": (groups, *(group.rows // groups,) * 2)}
    sizes = known.get(kind_of(module, group), stacked)
    return {key: like.new_zeros(size, dtype=wide) for key, size in sizes.items()}


def numbers(block: Block) -> dict[str, Tensor]:
    """The tensors that a block is made of, for a layer's state."""
    if isinstance(block, KroneckerBlock | GroupedBlock):
        return {"Q": block.Q, "G": block.G}
    if isinstance(block, ScaledBlock):
        return {"f": block.f, "M": block.M}
    if isinstance(block, DenseBlock):
        return {"matrix": block.matrix}
    assert isinstance(block, DiagonalBlock)
    return {"D": block.D}


def stored(state: dict[str, Any], group: Group) -> Block | None:
    """The running block of a layer's state, if there is one and it fits the layer."""
    block: Block | None = None
    if not state.get("estimates"):
        return None
    if "Q" in state:
        Q, G = state["Q"], state["G"]
        block = KroneckerBlock(Q, G) if Q.ndim == 2 else GroupedBlock.of(Q, G)
    elif "matrix" in state:
        if len(state["matrix"]) != group.size:
            return None
        block = DenseBlock(state["matrix"], group.rows, group.columns)
    elif "M" in state:
        block = ScaledBlock(state["f"], state["M"])
    else:
        block = DiagonalBlock(state["D"])
    return block if (block.rows, block.columns) == (group.rows, group.columns) else None


def store(state: dict[str, Any], group: Group, fresh: Block, decay: float) -> None:
    """Average a fresh block into the running one, which is a plain mean at first.

    A layer that had no part in a pass keeps what it had.

    Args:
        state: a layer's state, where the block and the count of estimates are kept.
        group: the layer's parameters.
        fresh: the estimate of now.
        decay: the weight of the past, once there is enough of it.
    """
    past, count = stored(state, group), 1
    if past is not None and not bool(fresh.trace()):
        return
    if past is not None and _fit(past, fresh) and bool(past.trace()):
        count = state["estimates"] + 1
        fresh = past.average(fresh, min(decay, 1 - 1 / count))
    for key in KEYS:
        state.pop(key, None)
    state.update(numbers(fresh), estimates=count)


def _fit(one: Block, other: Block) -> bool:
    shapes = [{key: part.shape for key, part in numbers(each).items()} for each in (one, other)]
    return shapes[0] == shapes[1]


def careful_inverse(
    name: str,
    block: Block,
    damping: float,
    inversion: Inversion,
    last: Inverse | None,
    progress: Progress,
) -> Inverse:
    """A damped inverse; where factorising fails, a more careful one, or the last one.

    Each failure is counted in ``progress.mended``.
    """
    for wide, amount in ((False, 1), (False, 10), (True, 10), (True, 1000)):
        try:
            return (block.double() if wide else block).invert(amount * damping, inversion)
        except (FactorisationError, RuntimeError):  # torch's LinAlgError is one
            progress.mended += 1
    if last is not None:
        return last
    raise FactorisationError(
        f"the curvature of layer '{name}' could not be inverted, not even in float64 with a "
        f"thousand times the damping {damping:.3g}. Look at what enters the layer."
    )
