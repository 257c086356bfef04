"""``gn.explain``: what each parameter of a model gets, what it costs, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tabulate import tabulate
from torch import Tensor, nn

from gaussnewton.blocks import (
    Block,
    DenseBlock,
    DiagonalBlock,
    GroupedBlock,
    ScaledBlock,
    TiledBlock,
)
from gaussnewton.compiled import original
from gaussnewton.estimate import curvature
from gaussnewton.estimators import Estimator, estimator_of
from gaussnewton.foreseen import Foreseen, foreseen_blocks
from gaussnewton.parameters import Group, Theta
from gaussnewton.tiles import stacks

BESIDE = "used in other ways than by calls of its layer: exact diagonal"


def explain(
    model: nn.Module,
    criterion: Any = None,
    data: Any = None,
    method: str | Estimator = "kflr",
    *,
    outputs: Callable[[Any], Any] | None = None,
    strict: bool = False,
) -> str:
    """A table of all trained parameters: their block, its memory and cost, and why it is that.

    From the model alone it says what is to be expected. Given a batch too, it makes the blocks and
    says what they are: how a module without a rule uses its parameters is known only then.

    Args:
        model: a network.
        criterion: as for :func:`~gaussnewton.curvature`; only with a batch.
        data: one batch, or none.
        method: as there.
        outputs: as there.
        strict: raise where a parameter gets less than a block of its layer's kind; with a batch.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.LayerNorm(4),
        ...                             torch.nn.Linear(4, 3))
        >>> print(gn.explain(model))
        parameters        matrix    block                             memory    to invert  note
        ----------------  --------  ------------------------------  --------  -----------  ------
        0.weight          9 x 4     Kronecker, one factor diagonal     100 B           64
        1.weight, 1.bias  1 x 8     dense                              256 B          170
        2.weight, 2.bias  3 x 5     Kronecker                          136 B          152
    """
    theta = Theta(original(model))
    estimator = estimator_of(method)
    foreseen = foreseen_blocks(original(model), theta, estimator.eigenvalues, estimator.largest)
    if data is not None:
        found = curvature(model, criterion, data, method, outputs=outputs, strict=strict)
        foreseen = {name: actual(foreseen[name], block) for name, block in found.items()}
    elif strict:
        raise ValueError(
            "strict=True needs a batch: how a module without a rule uses its parameters is known "
            "only when it does. Write gn.explain(model, criterion, batch, strict=True)."
        )
    return table(theta, foreseen)


def actual(foreseen: Foreseen, block: Block) -> Foreseen:
    """What a group really got, with the reason if that is less than was foreseen."""
    if block.kind == "zero":
        return Foreseen(block, "without a part in this pass")
    if not isinstance(block, DiagonalBlock):
        return Foreseen(block, "" if "has no rule" in foreseen.fallback else foreseen.fallback)
    small = isinstance(foreseen.block, DiagonalBlock)
    return Foreseen(block, foreseen.fallback or ("" if small else BESIDE))


def table(theta: Theta, foreseen: Mapping[str, Foreseen]) -> str:
    """The table, with one line for each group of parameters."""
    rows = [_row(group, foreseen[group.name]) for group in theta]
    headers = ["parameters", "matrix", "block", "memory", "to invert", "note"]
    align = ("left", "left", "left", "right", "right", "left")
    return tabulate(rows, headers, disable_numparse=True, colalign=align)


def _row(group: Group, foreseen: Foreseen) -> list[str]:
    block = foreseen.block
    size = sum(part.numel() * part.element_size() for part in block.numbers().values())
    return [
        ", ".join(group.parameters),
        f"{group.rows} x {group.columns}",
        block.kind,
        _with_unit(size, 1024, ["B", "KiB", "MiB", "GiB"]),
        _with_unit(multiplications(block), 1000, ["", "k", "M", "G", "T"]),
        foreseen.fallback,
    ]


def multiplications(block: Block) -> int:
    """About how many a damped inverse takes: d³ for each factor, a third of it for Cholesky's.

    Example:
        >>> import torch, gaussnewton as gn
        >>> from gaussnewton.explaining import multiplications
        >>> multiplications(gn.KroneckerBlock(Q=torch.eye(3), G=torch.eye(2)))
        35
    """
    if isinstance(block, GroupedBlock):
        return sum(multiplications(part) for part in block.parts)
    if isinstance(block, DiagonalBlock):
        return block.D.numel()
    if isinstance(block, DenseBlock):
        return (block.rows * block.columns) ** 3 // 3
    if isinstance(block, ScaledBlock):
        return block.columns**3
    if isinstance(block, TiledBlock):
        return _cubes(block.Q) + _cubes(block.G)
    return block.rows**3 + block.columns**3


def _cubes(T: Tensor) -> int:
    """Of the widths of all tiles."""
    return sum(len(tiles) * tiles.shape[1] ** 3 for _, tiles in stacks(T))


def _with_unit(number: int | float, base: int, units: list[str]) -> str:
    unit = units[0]
    for unit in units:
        if number < base or unit == units[-1]:
            break
        number /= base
    digits = f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"
    return f"{digits} {unit}".strip()
