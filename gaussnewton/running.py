"""Running averages of Q and G (section 5), and damped inverses that do not fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gaussnewton.blocks import Inverse, Inversion, KroneckerBlock
from gaussnewton.errors import FactorisationError
from gaussnewton.estimators import Estimator
from gaussnewton.observer import Observation
from gaussnewton.progress import Progress


def blocks_of(
    observations: Sequence[Observation], estimator: Estimator
) -> dict[str, KroneckerBlock]:
    """The blocks of f, of all observed passes together."""
    result: dict[str, KroneckerBlock] = {}
    data = 0
    for observation in observations:
        assert observation.factor is not None
        factor, count = float(observation.factor), observation.record.data
        for name, block in estimator.of_chain(observation.chain).items():
            assert isinstance(block, KroneckerBlock)
            if name in result:
                result[name] = result[name].merge(block, (data, count), (1.0, factor))
            else:
                result[name] = KroneckerBlock(block.Q, block.G * factor)
        data += count
    return result


def store(state: dict[str, Any], fresh: KroneckerBlock, decay: float) -> None:
    """Average a fresh block into the running one, which is a plain mean at first.

    Args:
        state: a layer's state, where Q, G and their count are kept.
        fresh: the estimate of now.
        decay: the weight of the past, once there is enough of it.
    """
    fits = "Q" in state and (state["Q"].shape, state["G"].shape) == (fresh.Q.shape, fresh.G.shape)
    count = state.get("estimates", 0) + 1 if fits else 1
    if count > 1:
        past = KroneckerBlock(state["Q"], state["G"])
        fresh = past.average(fresh, min(decay, 1 - 1 / count))
    state.update(Q=fresh.Q, G=fresh.G, estimates=count)


def careful_inverse(
    name: str,
    block: KroneckerBlock,
    damping: float,
    inversion: Inversion,
    last: Inverse | None,
    progress: Progress,
) -> Inverse:
    """A damped inverse; where factorising fails, a more careful one, or the last one.

    Each failure is counted in ``progress.mended``.
    """
    wide = KroneckerBlock(block.Q.double(), block.G.double())
    for candidate, amount in ((block, 1), (block, 10), (wide, 10), (wide, 1000)):
        try:
            return candidate.invert(amount * damping, inversion)
        except (FactorisationError, RuntimeError):  # torch's LinAlgError is one
            progress.mended += 1
    if last is not None:
        return last
    raise FactorisationError(
        f"the curvature of layer '{name}' could not be inverted, not even in float64 with a "
        f"thousand times the damping {damping:.3g}. Look at what enters the layer."
    )
