"""The numbers that an optimiser carries from step to step."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """Counters and damping, saved with the optimiser's state as plain numbers.

    Attributes:
        t: updates so far, refused ones included.
        tau: τ; zero until the first batch has been seen.
        gamma: γ.
        first_tau: what the bounds of τ and γ are multiples of.
        inverted_with: γ of the inverses in use.
        written_out: whether they are multiplied out, or triangular factors.
        wide: whether curvature is estimated and inverted in float64 by now.
        narrow: whether inverses may be applied in bfloat16; None before the first that might be.
        skipped: steps skipped for numbers that were not finite.
        skipped_in_a_row: those since the last good step.
        refused: steps taken back.
        mended: factorisations that failed at first, and estimates that were not finite.
        age: updates since the last estimate of curvature.
        look: whether the next step's ρ is looked at out of turn.
        noise: how much of the loss the averaged parameters save, a running mean.
        slope: of the loss at the averaged parameters, towards the present ones and as a share of
            it, a running mean over looks at which steps were carried on.
        judged: the update of the last look at the averaged parameters.
        boldness: what noise has left of the length of noisy steps, 1 for all of it.
        fitted: the share of a batch's loss that its whole step would take away, a running mean.
        followed: from 0 to 1, how far it is trusted where averages lead.
        carried: the share of what the averaged parameters moved by that the last update was
            carried along by.
        blamed: the last update that failed for what was carried; far in the past before any.
        surprise: how far the loss of a fresh batch is from that of the last one, in units of what
            a step was to change, a running mean; 0 where batches are all the same, ∞ where
            nothing is known of them.
        promise: what steps were to gain of late, a running mean.
        bend: dᵀ Ḡ d of directions in units of dᵀ C̃ d, a running mean over looks; zero before.
        spread: how far looks are off that mean, as a logarithm, a running mean.
        looked: the update of the last look.
        last_after: f after the last step, on its own batch, if it was looked at.
        greatest_loss: the greatest |f| so far, on which rounding is measured.
        last_loss: f before the last step.
        last_predicted: what the last step was to change of it; zero if it is not to be judged.
    """

    t: int = 0
    tau: float = 0.0
    gamma: float = 0.0
    first_tau: float = 0.0
    inverted_with: float = 0.0
    written_out: bool = False
    wide: bool = False
    narrow: bool | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    refused: int = 0
    mended: int = 0
    age: int = 0
    look: bool = False
    noise: float = 0.0
    slope: float = 0.0
    judged: int = 0
    boldness: float = 1.0
    fitted: float = 1.0
    followed: float = 0.0
    carried: float = 0.0
    blamed: int = -1000
    surprise: float = math.inf
    promise: float = 0.0
    bend: float = 0.0
    spread: float = 0.0
    looked: int = 0
    last_after: float | None = None
    greatest_loss: float = 0.0
    last_loss: float = 0.0
    last_predicted: float = 0.0

    def shown(self) -> dict[str, Any]:
        """What a user may want to see of it."""
        counts = ("refused", "skipped", "mended")
        names = ("t", "tau", "gamma", "noise", "surprise", "boldness", "carried", "wide", *counts)
        return {name: getattr(self, name) for name in names}

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for a state dict."""
        return asdict(self)
