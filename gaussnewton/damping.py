"""How τ and γ start and move (appendix B.3, and beyond it).

τ damps the full Gauss-Newton matrix of the quadratic model, γ the blocks that give the
direction. Both are bounded by multiples of where τ started.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from gaussnewton.blocks import Block
from gaussnewton.progress import Progress
from gaussnewton.settings import Damping
from gaussnewton.share import ALIKE

FIRST_MULTIPLES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0)
"""Of the mean curvature: what is tried for τ on the first batch, if it has data enough."""

SCARCEST = 100.0
"""Batches of which more would be wanted for data enough are treated alike."""

NEARLY = 0.9
"""The share of the best first step's fall in loss with which another is nearly as good."""

QUIET, NOISY, LOST = 0.005, 0.15, 0.5
"""Shares of the loss that the averaged parameters save: below the first nothing is noisy, above the
second τ rises, above the third the averaged parameters are the place to go on from."""

LAGGING = -0.003
"""As much of the loss the averaged parameters lack at least where steps lead somewhere."""

DOWNHILL = -0.01
"""The same where steps are carried on, by the slope of the loss at the averaged parameters, towards
the present ones: averages hardly lag behind there, but that slope is still free of noise."""

TRUSTED = 0.5
"""That slope decides where averages are followed so far at least, or will be soon."""

STEEP, FASTEST = -0.025, 6.0
"""Where that slope is steeper than the first, τ falls as its third power, to so many times as fast:
steps that all lead the same way are held back by damping alone."""

MOSTLY = 0.5
"""Where more of the quadratic model's curvature than this is damping, that makes steps short."""

NOISE_MEMORY = 0.7

MUCH = 2.0
"""A surprise counts for no more than this, so that one odd batch is soon forgotten."""

UNHEARD_OF = 4.0
"""A part of a batch, or an expectation, that promises so many times what steps were to gain of late
is not believed."""

MOVED = 1.5
"""Inverses serve on while γ has changed by no more than this factor. A direction hardly depends on
it, and the quadratic model, which has τ itself, decides how far to go."""

REFUSAL = 4
"""After a refused step τ rises by as much as in so many ordinary rises at the start."""


def mean_eigenvalue(blocks: Mapping[str, Block]) -> float:
    """tr(C̃) / dim(C̃), over all blocks: the scale on which damping is small or large."""
    size = sum(block.rows * block.columns for block in blocks.values())
    return float(torch.stack([block.trace() for block in blocks.values()]).sum()) / size


def first_candidates(blocks: Mapping[str, Block], wanted: float, settings: Damping) -> list[float]:
    """What to try for τ on the first batch, from the least on.

    A batch of fewer data than a layer has inputs says nothing of some directions, where damping
    is all that holds a step back, and its own loss falls however little there is of it. In the
    others curvature is as many times its mean over all directions as there are inputs to a datum.
    So lesser multiples of that mean than the batches that are wanted for data enough are left out.

    Args:
        blocks: the curvature of the first batch.
        wanted: see :func:`~gaussnewton.scarcity.batches_wanted`.
        settings: what is set about damping.
    """
    if settings.tau is not None:
        return [settings.tau]
    mean, least = mean_eigenvalue(blocks), min(wanted, SCARCEST)
    return [multiple * mean for multiple in FIRST_MULTIPLES if multiple >= least]


def best_first(falls: Mapping[float, float]) -> float:
    """The least τ whose first step lowers the loss nearly as much as the best of them.

    The best one itself is often far greater: the falls hardly depend on τ over a wide range, and
    what is too much now is far too much soon.

    Example:
        >>> from gaussnewton.damping import best_first
        >>> best_first({0.1: 3.0, 1.0: 9.5, 10.0: 10.0})
        1.0
    """
    best = max(falls.values())
    return min(tau for tau, fall in falls.items() if fall >= min(NEARLY * best, best))


def past_the_best(falls: Mapping[float, float]) -> bool:
    """Whether greater τ need not be tried: the last one's fall is less than one before it.

    Falls rise and then fall with τ, so that none further on is the best.

    Args:
        falls: by τ, from the least on.

    Example:
        >>> from gaussnewton.damping import past_the_best
        >>> past_the_best({0.1: 3.0, 1.0: 9.5}), past_the_best({0.1: 3.0, 1.0: 9.5, 10.0: 9.4})
        (False, True)
    """
    best, last = max(falls.values()), list(falls.values())[-1]
    return best > 0 and last < best


def start(tau: float, progress: Progress) -> None:
    """τ₀ and γ₀."""
    progress.first_tau = progress.tau = progress.gamma = tau
    progress.bend = 0.0  # it was found with another γ


def adapt_tau(rho: float, damped: float, progress: Progress, settings: Damping) -> None:
    """Levenberg and Marquardt's rule: τ falls where the quadratic model is good, else it rises.

    It rises too where the steps are too long for the noise of the batches, however good the
    model is on the batch that it was fitted to, and does not fall where they lead nowhere.

    Args:
        rho: ρ, what a step changed in units of what it was to change.
        damped: how much of the model's curvature along the step is damping.
        progress: where τ is.
        settings: what is set about it.
    """
    omega = settings.decay ** settings.interval(progress.t)
    if progress.noise > NOISY or rho < settings.raise_below:
        _set_tau(progress.tau / omega, progress, settings)
    elif rho > settings.lower_above and _may_fall(damped, progress, settings):
        _set_tau(progress.tau * omega ** _haste(progress), progress, settings)


def _haste(progress: Progress) -> float:
    """How many times as fast as usual τ falls: by the slope at the averaged parameters.

    Where batches are small that is noise, by which τ would fall to nothing.
    """
    trusted = progress.slope if progress.followed > TRUSTED else 0.0
    return min(max(trusted / STEEP, 1.0) ** 3, FASTEST)


def _may_fall(damped: float, progress: Progress, settings: Damping) -> bool:
    """Whether less damping can do any good: where the averaged parameters lag behind, or would.

    Steps that get shorter with τ have an ever better ρ, and ever less noise. Where batches are all
    alike, little noise will do, and where it is damping that makes steps short.
    """
    lenient = not settings.anneal or progress.surprise < ALIKE or damped > MOSTLY
    if lenient:
        return progress.noise < QUIET
    follows = progress.followed > TRUSTED
    return progress.slope < DOWNHILL if follows else progress.noise < LAGGING


def note_noise(saved: float, passed: int, progress: Progress, settings: Damping) -> bool:
    """Take note of the share of a fresh batch's loss that the averaged parameters save.

    What the last steps gained is then less than what they jumped about. Returns whether the
    present parameters are lost: far worse than the average of what they were. The running mean
    reaches back over as many updates however rarely it is looked at: otherwise steps would be
    too long for noise that has come up since.

    Args:
        saved: that share.
        passed: updates since the last look.
        progress: where the running mean is.
        settings: how often there are looks at first.
    """
    memory = _memory(passed, settings)
    progress.noise = memory * progress.noise + (1 - memory) * saved
    return saved > LOST


def note_slope(slope: float, passed: int, progress: Progress, settings: Damping) -> None:
    """Take note of the slope at the averaged parameters, towards the present ones.

    Args:
        slope: as a share of the loss.
        passed: updates since the last look.
        progress: where the running mean is.
        settings: how often there are looks at first.
    """
    if not math.isfinite(slope):
        return
    memory = _memory(passed, settings)
    progress.slope = memory * progress.slope + (1 - memory) * slope


def _memory(passed: int, settings: Damping) -> float:
    return float(NOISE_MEMORY ** (passed / settings.tau_interval))


def note_surprise(before: float, progress: Progress) -> None:
    """Take note of how far the loss of a fresh batch is from that of the last one after its step.

    In units of what that step was to change: zero where batches are all the same.
    """
    if progress.last_after is None or not progress.last_predicted:
        return
    ratio = abs(before - progress.last_after) / abs(progress.last_predicted)
    past = progress.surprise if math.isfinite(progress.surprise) else ratio
    progress.surprise = NOISE_MEMORY * past + (1 - NOISE_MEMORY) * min(ratio, MUCH)
    progress.last_after = None


def note_promise(predicted: float, progress: Progress) -> None:
    """Take note of what a step is to gain."""
    gain = min(abs(predicted), believed(progress))
    past = progress.promise or gain
    progress.promise = NOISE_MEMORY * past + (1 - NOISE_MEMORY) * gain


def believed(progress: Progress) -> float:
    """The greatest fall in loss that a quadratic model may promise without the whole batch's word.

    The slope is that of the whole batch. One odd datum of it, outside of the part, can lead
    where the part has no curvature at all.
    """
    return UNHEARD_OF * progress.promise if progress.promise else math.inf


def memory_of_gradients(smooth: float, progress: Progress, settings: Damping) -> float:
    """β of the running mean of gradients: at first everything changes, and old ones mislead."""
    return 0.0 if progress.t <= settings.tau_interval else smooth


def has_moved(progress: Progress) -> bool:
    """Whether γ is too far from that of the inverses in use for them to be used on."""
    ratio = progress.gamma / progress.inverted_with if progress.inverted_with else math.inf
    return not 1 / MOVED <= ratio <= MOVED


def raise_after_refusal(progress: Progress, settings: Damping) -> None:
    """Much more damping, for a step that failed."""
    omega = settings.decay ** (REFUSAL * settings.tau_interval)
    _set_tau(progress.tau / omega, progress, settings)


def gamma_candidates(progress: Progress, settings: Damping) -> list[float]:
    """{ω γ, γ, γ/ω}."""
    omega = settings.decay**settings.gamma_interval
    return [
        _bounded(gamma, progress, settings)
        for gamma in (omega * progress.gamma, progress.gamma, progress.gamma / omega)
    ]


def _set_tau(value: float, progress: Progress, settings: Damping) -> None:
    progress.tau = _bounded(value, progress, settings)
    if settings.gamma == "tied":
        progress.gamma = progress.tau


def _bounded(value: float, progress: Progress, settings: Damping) -> float:
    low, high = settings.bounds
    return min(max(value, low * progress.first_tau), high * progress.first_tau)
