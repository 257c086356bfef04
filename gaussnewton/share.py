"""How much of the quadratic model's step is taken: the model is one batch's, noise and all."""

from __future__ import annotations

import math

from gaussnewton.progress import Progress
from gaussnewton.settings import Damping

CLEAR = -0.1
"""As much of the loss the averaged parameters lack where steps clearly lead somewhere."""

SETTLED = 100
"""So many updates are as long as they may be, noise or not. From there on that lack has to be
greater in proportion to their number: whole steps were found to pay only at the start, and a small
batch says of a lag what it likes."""

EARLY_SHARE = 0.8
"""How much of a clear step is taken at the start, where curvature changes so fast that all of it
overshoots."""

ALIKE = 0.2
"""Batches that differ by this share of what a step gains are no more alike than others."""

TOLERATED = 0.025
"""Where the averaged parameters save more of the loss than this, noisy steps get shorter; where
they save less, longer again."""

POWER = 1.5
"""They do so at most as this power of the number of updates."""

SHORTEST = 0.1
"""What is left of a noisy step at least."""


def share_of_step(share: float, early: int, progress: Progress, settings: Damping) -> float:
    """How much of the quadratic model's step to take: all of it where steps lead somewhere.

    The model is that of one batch, and its minimum fits that batch's noise too.

    Args:
        share: of a step that is made of noise; of that, what noise has left of it so far.
        early: so many updates are the start.
        progress: where training is.
        settings: what is set about damping.
    """
    if not settings.anneal:
        return share
    noisy = progress.boldness * share
    clear = EARLY_SHARE if progress.t <= early else 1.0
    return noisy + max(clear - noisy, 0) * clearness(progress)


def clearness(progress: Progress) -> float:
    """From 0, where batches are noisy, to 1, where steps clearly lead somewhere.

    They do where batches differ by far less than steps gain, as full batches do, and where the
    loss falls so fast that the averaged parameters lag far behind.
    """
    lagging = progress.noise / (CLEAR * max(1.0, progress.t / SETTLED))
    return min(max(lagging, 1 - progress.surprise / ALIKE, 0.0), 1.0)


def temper(passed: int, progress: Progress) -> None:
    """Shorter steps where they jump about by more than is tolerated, else longer ones again.

    Averages take noise away, but only as much of it as there are updates in them, and steps that
    are long for the noise fit each batch and lose the ones before. The averaged parameters reach
    back over a share of all updates, so that what this does shows in them only later, the more so
    the later it is; and it is done as a power of the number of updates, so that it does not
    swing to and fro.

    Args:
        passed: updates since this was done last.
        progress: where training is; ``noise`` says what the averaged parameters save.
    """
    if progress.t < SETTLED:
        return
    excess = min(max(progress.noise / TOLERATED - 1, -1.0), 1.0)
    power = -POWER * excess * passed / progress.t
    progress.boldness = min(max(progress.boldness * math.exp(power), SHORTEST), 1.0)
