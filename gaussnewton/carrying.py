r"""Steps that go on with the averaged parameters: how much of their movement is carried along.

.. math:: θ_{t+1} = θ_t + δ_t + μ (\hatθ_{t+1} − \hatθ_t)

It is Nesterov's momentum with the velocity of the averaged parameters θ̂. What all steps of late
have in common goes on up to 1 / (1 − μ) times as far, and what only some of them have, noise and
the swings along directions of great curvature that bound the length of steps, hardly at all. With
averages over a window that is a share of all updates, the friction falls as one over their number,
as Nesterov's does.
"""

from __future__ import annotations

import math

from gaussnewton.progress import Progress
from gaussnewton.share import SETTLED, clearness

LITTLE, MUCH = 0.3, 0.6
"""Shares of a batch's loss that its whole step would take away. Up to the first all is carried that
may be; from the second on nothing, since then a batch has fewer data than it takes to tell what is
to be learnt from noise, and noise is what would be carried."""

CALM, ROUGH = 0.05, 0.1
"""Shares of the loss that the averaged parameters save: up to the first all is carried that may be,
from the second on nothing."""

FORESEEN = 70
"""From this update on it is looked at where averages lead, where steps are to be carried on."""

MEMORY = 0.95
"""Of the running mean of that share, by update."""


def note_fitted(whole: float, before: float, progress: Progress) -> None:
    """Take note of the share of a batch's loss that its whole step would take away, undamped.

    That is about how many degrees of freedom there are for each datum. Where the loss is no
    greater than zero, that says nothing, and all of it counts as fitted.

    Args:
        whole: what the quadratic model without damping promises at its minimum.
        before: the loss.
        progress: where the running mean is.
    """
    share = min(whole / before, 1.0) if before > 0 and not whole < 0 else 1.0
    if math.isfinite(share):
        progress.fitted = MEMORY * progress.fitted + (1 - MEMORY) * share


def followed(progress: Progress) -> float:
    """How far averages may be followed, from 0 to 1: with so much of the greatest μ.

    At the start, and wherever the loss falls so fast that averages lag far behind, what they moved
    by is of a past that is no guide.

    Example:
        >>> from gaussnewton.carrying import followed
        >>> from gaussnewton.progress import Progress
        >>> [round(followed(Progress(t=200, fitted=share)), 2) for share in (0.1, 0.45, 0.9)]
        [1.0, 0.5, 0.0]
    """
    if progress.t < FORESEEN:
        return 0.0
    unfitted = min(max((MUCH - progress.fitted) / (MUCH - LITTLE), 0.0), 1.0)
    calm = min(max((ROUGH - progress.noise) / (ROUGH - CALM), 0.0), 1.0)
    return unfitted * calm * (1 - clearness(progress))


def note_followed(most: float, progress: Progress) -> None:
    """Whether averages are followed in this update, and its μ.

    Args:
        most: the greatest μ.
        progress: where training is.
    """
    progress.followed = followed(progress) if most else 0.0
    progress.carried = most * progress.followed if progress.t >= SETTLED else 0.0


def takes_blame(progress: Progress) -> bool:
    """Whether an update failed for what was carried; then nothing is, for a dozen updates at least.

    Not if the last one that did is hardly longer ago: then there is too little damping.
    """
    to_blame = progress.carried > 0.1 and not 0 < progress.t - progress.blamed < 40
    progress.blamed = progress.t if to_blame else progress.blamed
    progress.fitted = 1.0 if progress.carried else progress.fitted
    progress.carried = progress.followed = progress.slope = 0.0
    return to_blame


def shortened(share: float, carried: float) -> float:
    """A share of a noisy step, where μ is carried along: less of it is needed."""
    return share * math.sqrt(1 - carried)


def window(memory: float, carried: float) -> float:
    """β of the averaged parameters where μ is carried along: over 1 − 0.6 μ of the updates.

    They are then also what velocity is measured by, which has to be of late.

    Example:
        >>> from gaussnewton.carrying import window
        >>> window(0.99, carried=0.0), round(window(0.99, carried=0.7), 4)
        (0.99, 0.9828)
    """
    return 1 - min(1.0, (1 - memory) / (1 - 0.6 * carried))
