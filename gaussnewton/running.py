"""Running averages of Q and G (section 5), and damped inverses that do not fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gaussnewton.blocks import Block, Inverse, Inversion
from gaussnewton.blocks.joining import NUMBERS, block_of, merged
from gaussnewton.errors import FactorisationError
from gaussnewton.estimators import Estimator
from gaussnewton.observer import Observation
from gaussnewton.parameters import Group
from gaussnewton.precision import has_float64
from gaussnewton.progress import Progress


def blocks_of(
    observations: Sequence[Observation], estimator: Estimator
) -> Iterator[tuple[str, Block]]:
    """The blocks of f, of all observed passes together; of a single pass one after the other."""
    if len(observations) > 1:
        yield from _merged_blocks(observations, estimator).items()
        return
    (observation,) = observations
    assert observation.factor is not None
    factor = float(observation.factor)
    for name, block in estimator.each(observation.passage):
        yield name, block if factor == 1 else block.scaled(factor)


def _merged_blocks(observations: Sequence[Observation], estimator: Estimator) -> dict[str, Block]:
    result: dict[str, Block] = {}
    data = 0
    for observation in observations:
        assert observation.factor is not None
        factor, count = float(observation.factor), observation.record.data
        for name, block in estimator.each(observation.passage):
            if name in result:
                result[name] = merged(result[name], block, (data, count), (1.0, factor))
            else:
                result[name] = block.scaled(factor)
        data += count
    return result


def stored(state: dict[str, Any], group: Group) -> Block | None:
    """The running block in a layer's state, if there is one and it fits the layer's matrix."""
    if "estimates" not in state:
        return None
    return block_of(state, group.rows, group.columns)


SHARES = (1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1)
"""Of its mean eigenvalue, what each factor of a block gets at least where factorising it failed:
rounding has made it indefinite by about so much."""


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
    if past is not None:
        past, fresh = in_one_precision(past, fresh)
    if past is not None and not bool(fresh.trace()):
        return
    if past is not None and _alike(past, fresh) and bool(past.trace()):
        count = state["estimates"] + 1
        fresh = past.absorb(fresh, min(decay, 1 - 1 / count))
    for key in NUMBERS & state.keys():
        del state[key]
    state.update(fresh.numbers(), estimates=count)


def in_one_precision(past: Block, fresh: Block) -> tuple[Block, Block]:
    """Both in the wider one's."""
    dtypes = [next(iter(block.numbers().values())).dtype for block in (past, fresh)]
    if dtypes[0] == dtypes[1]:
        return past, fresh
    wide = torch.promote_types(*dtypes)
    return past.to(wide), fresh.to(wide)


def _alike(past: Block, fresh: Block) -> bool:
    """Of one kind and of numbers of one size: tiles may have had another limit."""
    if type(past) is not type(fresh):
        return False
    sizes = [{key: part.shape for key, part in block.numbers().items()} for block in (past, fresh)]
    return sizes[0] == sizes[1]


def careful_inverse(
    name: str,
    block: Block,
    damping: float,
    inversion: Inversion,
    choices: Sequence[torch.dtype],
    last: Inverse | None,
    progress: Progress,
) -> Inverse:
    """A damped inverse; where factorising fails, one in float64, or of a block with more damping.

    Where nothing helps, the last one.

    Each failure is counted in ``progress.mended``. It is multiplied out if
    ``progress.written_out`` says so.

    Args:
        name: of the layer.
        block: to be inverted.
        damping: k.
        inversion: how k is added.
        choices: in which precisions the inverse may be applied.
        last: the inverse before, if there is one.
        progress: where failures are counted.
    """
    wide = has_float64(next(iter(block.numbers().values())).device)
    for share in (0.0, *SHARES):
        mended = block.double() if share and wide else block
        k = max(damping, share**2 * float(block.trace()) / (block.rows * block.columns))
        try:
            inverse = mended.invert(k, inversion)
        except (FactorisationError, RuntimeError):  # torch's LinAlgError is one
            progress.mended += 1
        else:
            return inverse.multiplied_out(choices) if progress.written_out else inverse
    if last is not None:
        return last
    raise FactorisationError(
        f"the curvature of layer '{name}' could not be inverted, not even with {SHARES[-1]} of its "
        f"mean eigenvalue added to damping {damping:.3g}. Look at what enters the layer."
    )
