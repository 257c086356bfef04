"""Steps that are judged afterwards, and taken back where they failed."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gaussnewton import damping as rules
from gaussnewton.carrying import shortened, takes_blame
from gaussnewton.matrices import Matrices
from gaussnewton.observer import Observation
from gaussnewton.observing import ObservingOptimizer
from gaussnewton.precision import widened
from gaussnewton.progress import Progress
from gaussnewton.settings import Damping, Guard
from gaussnewton.share import temper


class GuardedOptimizer(ObservingOptimizer):
    """An optimiser that knows where its last step began, and can go back there.

    A step may fail in three ways: on its own batch, which the subclass sees; on the next batch,
    which is seen here; and slowly, by jumping about more than it gains, which is seen here too,
    by the averaged parameters. After each τ rises, or nothing is carried on for a while. Steps
    that jump about too much get shorter before that.
    """

    damping: Damping
    guard: Guard

    @abstractmethod
    def _damping_raised(self, progress: Progress) -> None:
        """What a subclass has computed with the old γ is to be computed again."""

    def _lost(
        self, observations: Sequence[Observation], before: Tensor, progress: Progress
    ) -> bool:
        """Compare with the averaged parameters on this fresh batch; go back to them if lost."""
        settings = self.damping
        due = settings.anneal and progress.t % settings.interval(progress.t) == 0
        if not due or not progress.last_predicted:
            return False
        with self.averaged():
            averaged = self._evaluate(observations)
        saved = float(before - averaged)
        if abs(saved) <= self._resolution(observations, progress):
            saved = 0.0
        scale = abs(float(before)) + abs(progress.last_predicted)
        passed = min(progress.t - progress.judged, settings.interval(progress.t))
        if progress.followed:
            slope = self._slope(observations, float(averaged), float(before))
            if abs(slope) <= 8 * self._resolution(observations, progress):  # three values' rounding
                slope = 0.0
            rules.note_slope(slope / scale, passed, progress, settings)
        else:
            progress.slope = 0.0
        progress.judged = progress.t
        lost = rules.note_noise(saved / scale, passed, progress, settings)
        temper(passed, progress)
        if not lost:
            return False
        self._restore([self.state[p].get("average", p) for p in self._parameters()])
        self._refuse(progress)
        return True

    def _slope(self, observations: Sequence[Observation], averaged: float, present: float) -> float:
        """The slope of f at the averaged parameters, towards the present ones.

        It is that of the parabola through f there, here and half-way between.
        """
        start = self._snapshot()
        try:
            for p in self._parameters():
                p.lerp_(self.state[p].get("average", p), 0.5)
            middle = float(self._evaluate(observations))
        finally:
            self._restore(start)
        return 4 * middle - 3 * averaged - present

    def _average(self, observations: Sequence[Observation], progress: Progress) -> None:
        super()._average(observations, progress)
        if progress.carried and progress.last_after is not None:
            progress.last_after = float(self._evaluate(observations))

    def _last_step_failed(
        self, observations: Sequence[Observation], before: float, t: int, progress: Progress
    ) -> bool:
        """Take back the last step if it raised the loss of this fresh batch beyond reason.

        Looked into only where the loss is suspiciously higher than that of the last batch,
        because it costs a forward pass. Where noise or what is carried has made steps shorter,
        they promise less than batches differ by, and more of a rise is no cause for suspicion.
        """
        start = self._start()
        if not self.guard.refuse or start is None:
            return False
        allowed = self.guard.fresh_tolerance * max(
            abs(progress.last_predicted), self._resolution(observations, progress)
        )
        shorter = shortened(progress.boldness, progress.carried)
        if before - progress.last_loss <= allowed / shorter:
            return False
        earlier = float(self._evaluate_at(observations, start))
        if not math.isfinite(earlier) or before - earlier <= allowed:
            return False
        self._leave_out_of_average(t, progress)
        self._restore(start)
        self._refuse(progress)
        return True

    def recover(
        self, observations: Sequence[Observation], before: Tensor, progress: Progress
    ) -> bool:
        """A loss that is not finite: take back the last step, if it is to blame."""
        if math.isfinite(float(before)):
            return False  # the gradient is not, which no step is to blame for
        return self._last_step_failed(observations, math.inf, progress.t, progress)

    def _refuse(self, progress: Progress) -> None:
        """More damping, a look at the next step, and nothing remembered of this one.

        Where a step was carried on, that is what went too far: it is not carried on for a while,
        and damping stays as it is.
        """
        progress.refused += 1
        progress.look = True
        progress.last_predicted = 0.0
        if not takes_blame(progress) and progress.tau:
            rules.raise_after_refusal(progress, self.damping)
            self._damping_raised(progress)
        for p in self._parameters():
            self.state[p].pop("start", None)
        self._diagnostics |= progress.shown()

    def _keep_start(self) -> list[Tensor]:
        """Keep where this step begins, in the place of where the last one did."""
        for p in self._parameters():
            start = self.state[p].get("start")
            if start is None or start.shape != p.shape or start.dtype != p.dtype:
                self.state[p]["start"] = p.detach().clone()
            else:
                start.copy_(p)
        return [self.state[p]["start"] for p in self._parameters()]

    def _remember(self, before: float, predicted: float, progress: Progress) -> None:
        """What the next step wants to know of this one."""
        progress.look = False
        progress.last_loss, progress.last_predicted = before, predicted

    def _start(self) -> list[Tensor] | None:
        """Where the last step began; None if there was none, or not for all parameters."""
        if not self.param_groups[0]["progress"]["last_predicted"]:
            return None  # it was refused, or is only there to be filled in
        found = [self.state[p].get("start") for p in self._parameters()]
        return None if any(part is None for part in found) else found

    def _previous(self) -> Matrices | None:
        """The last update; None if there is none for some layer.

        Parameters without a gradient had no part in this pass and are not to be moved.
        """
        if self._start() is None:
            return None
        return {
            group.name: group.matrix(
                {
                    key: torch.zeros_like(widened(p))
                    if p.grad is None
                    else widened(p) - widened(self.state[p]["start"])
                    for key, p in group.parameters.items()
                }
            )
            for group in self._observer.theta
        }

    def _prime(self) -> None:
        super()._prime()
        for p in self._parameters():
            self.state[p].setdefault("start", p.detach().clone())
