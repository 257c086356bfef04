"""Ways to dᵀ Ḡ d, the full Gauss-Newton matrix's curvature along directions: cheapest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from gaussnewton.matrices import Matrices
from gaussnewton.observer import Observation
from gaussnewton.progress import Progress
from gaussnewton.proposal import Gram
from gaussnewton.quadratic import gauss_newton_gram, looked_at
from gaussnewton.settings import StepSize

MEMORY = 0.7
"""Of the running geometric mean of dᵀ Ḡ d / dᵀ C̃ d, by look, and of how far off it was."""

WIDE = 0.6
"""Where looks are off by more than this, as a logarithm, a mean of them says little of the next."""

MUCH = 3.0
"""None counts for more than this, so that one odd batch is soon forgotten."""


def looks_at(observations: Sequence[Observation], settings: StepSize) -> list[Gram]:
    """J·v on a part of the batch, and on the whole of it; on the whole only, if that is the part.

    Args:
        observations: the forward passes whose loss is meant.
        settings: how large the part is.
    """
    data = [observation.record.data for observation in observations]
    whole = all(looked_at(n, settings.part, settings.least) == n for n in data)
    parts = (1.0,) if whole else (settings.part, 1.0)
    return [
        partial(gauss_newton_gram, observations, part=part, least=settings.least) for part in parts
    ]


def look_is_due(
    observations: Sequence[Observation], settings: StepSize, progress: Progress
) -> bool:
    """Whether it is time for another look: at every update where batches say different things.

    That is for chains that were known from the loop's own pass: their J·v of a part of the batch is
    a small part of an update. Anything else is run once more, which takes as long as the rest.

    Args:
        observations: the forward passes that a look would go through.
        settings: how often to look.
        progress: when the last look was, and how far looks differ.
    """
    cheap = all(observation.known for observation in observations)
    always = cheap and progress.spread > WIDE
    return progress.t - progress.looked >= (1 if always else settings.interval(progress.t))


def expecting(
    looks: Sequence[Gram], of_blocks: Callable[[Matrices], Tensor], due: bool, progress: Progress
) -> list[Gram]:
    """The same looks along one direction; before them, where none is due, what to expect of them.

    dᵀ Ḡ d is as many times dᵀ C̃ d as at the last looks: that ratio changes slowly, while either
    of them changes with each batch. Their running mean is taken, because what one batch says of
    it would spoil all updates up to the next look.

    Args:
        looks: see :func:`looks_at`.
        of_blocks: dᵀ C̃ d.
        due: whether to look in any case.
        progress: where the ratio is kept.
    """
    past, spread = progress.bend, progress.spread

    def expected(layers: Matrices | None, others: Matrices | None) -> Tensor:
        assert layers is None
        assert others is not None
        return (past * of_blocks(others)).reshape(1, 1)

    def noted(look: Gram, layers: Matrices | None, others: Matrices | None) -> Tensor:
        assert others is not None
        found = look(layers, others)
        ratio = float(found.squeeze() / of_blocks(others))
        if 0 < ratio < math.inf:  # of several looks the last one is believed
            off = min(abs(math.log(ratio / past)), MUCH) if past else spread
            progress.bend = (past or ratio) ** MEMORY * ratio ** (1 - MEMORY)
            progress.spread = MEMORY * spread + (1 - MEMORY) * off
        progress.looked = progress.t
        return found

    known = past > 0 and not due
    return [*([expected] if known else []), *(partial(noted, look) for look in looks)]
