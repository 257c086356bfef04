"""Running averages of Q and G (section 5), and damped inverses that do not fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gaussnewton.blocks import Block, Inverse, Inversion
from gaussnewton.blocks.joining import NUMBERS, block_of, merged
from gaussnewton.errors import FactorisationError
from gaussnewton.estimators import Estimator
from gaussnewton.observer import Observation
from gaussnewton.parameters import Group
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
    if past is not None and _alike(past, fresh) and bool(past.trace()):
        count = state["estimates"] + 1
        fresh = past.absorb(fresh, min(decay, 1 - 1 / count))
    for key in NUMBERS & state.keys():
        del state[key]
    state.update(fresh.numbers(), estimates=count)


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
    last: Inverse | None,
    progress: Progress,
) -> Inverse:
    """A damped inverse; where factorising fails, a more careful one, or the last one.

    Each failure is counted in ``progress.mended``. It is multiplied out if
    ``progress.written_out`` says so.
    """
    for wide, amount in ((False, 1), (False, 10), (True, 10), (True, 1000)):
        try:
            inverse = (block.double() if wide else block).invert(amount * damping, inversion)
            return inverse.multiplied_out() if progress.written_out else inverse
        except (FactorisationError, RuntimeError):  # torch's LinAlgError is one
            progress.mended += 1
    if last is not None:
        return last
    raise FactorisationError(
        f"the curvature of layer '{name}' could not be inverted, not even in float64 with a "
        f"thousand times the damping {damping:.3g}. Look at what enters the layer."
    )
