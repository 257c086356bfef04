"""``gn.GaussNewton``: the paper's algorithm as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gaussnewton import damping as rules
from gaussnewton.averaging import memory_at
from gaussnewton.blocks import Inverse, Inversion
from gaussnewton.carrying import note_fitted, note_followed, shortened, window
from gaussnewton.curved import CurvedOptimizer
from gaussnewton.errors import FactorisationError
from gaussnewton.estimators import BlockHessian, Estimator, estimator_of
from gaussnewton.estimators.base import check_largest
from gaussnewton.gradients import Gradient
from gaussnewton.looking import expecting, look_is_due, looks_at
from gaussnewton.matrices import Matrices, dot, inner
from gaussnewton.network import Network
from gaussnewton.observer import Observation
from gaussnewton.parameters import Group
from gaussnewton.precision import widened
from gaussnewton.progress import Progress
from gaussnewton.proposal import Gram, Proposal, calibrated, plain, squared
from gaussnewton.scarcity import batches_wanted
from gaussnewton.settings import Damping, Guard, Refresh, StepSize, check_kinds
from gaussnewton.share import share_of_step
from gaussnewton.smoothing import smooth, smoothed


class GaussNewton(CurvedOptimizer):
    """Gauss-Newton steps in place of ``torch.optim.Adam``, with nothing to tune.

    The loop stays as it is: the optimiser watches the model's and the criterion's calls.

    Args:
        model: a network that :func:`~gaussnewton.curvature` can handle.
        criterion: the loss module that the loop calls. Wrap a plain function once:
            ``criterion = gn.Loss(fn)``. None for a model that returns its loss: the one loss
            function of torch that it calls is then found inside.
        params: parameters or parameter groups to train, as for any optimiser; by default
            all that require gradients.
        lr: scales every step. 1 is the step of the quadratic model; schedulers may lower it. What
            noise had taken off the length of steps may come back in turn (``StepSize.share``).
        weight_decay: η, an L2 penalty η/2 ‖θ‖² on the parameters. It is part of the model's
            curvature, not a shrinkage beside it.
        curvature: "kfra", "kflr", "kfac" or an estimator. "auto" takes KFLR where it is cheap,
            as with few outputs, else KFRA; :meth:`explain` says which and why.
        inversion: "factored", or "exact" by eigendecompositions, which costs more. Blocks with
            corrected eigenvalues are inverted exactly in any case.
        damping: how τ and γ start and move.
        step_size: how far to go.
        refresh: how often curvature is estimated and inverted.
        guard: what to do when something goes wrong.
        largest: factors of curvature wider than this are cut to tiles at most so wide
            (:class:`~gaussnewton.TiledBlock`), so that wide layers do not cost the cube of their
            width; None for no limit. A lower limit of an estimator's own stays.
        outputs: where the loop calls the criterion on something else than one of the tensors that
            the model returns, the function that makes it of them, as
            ``lambda returned: returned.logits[:, :-1]``.
        strict: raise where a parameter gets less than a block of its layer's kind;
            :meth:`explain` tells which do.

    Example:
        >>> import torch, gaussnewton as gn
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(),
        ...                             torch.nn.Linear(8, 1))
        >>> criterion = torch.nn.MSELoss()
        >>> optimizer = gn.GaussNewton(model, criterion)
        >>> x = torch.randn(64, 4)
        >>> y = x.prod(1, keepdim=True)
        >>> for _ in range(80):
        ...     optimizer.zero_grad()
        ...     loss = criterion(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        >>> bool(criterion(model(x), y) < 0.1 * y.var())
        True
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module | None = None,
        params: Iterable[Any] | None = None,
        *,
        lr: float = 1.0,
        weight_decay: float = 0.0,
        curvature: str | Estimator = "auto",
        inversion: Inversion = "factored",
        damping: Damping = Damping(),  # noqa: B008
        step_size: StepSize = StepSize(),  # noqa: B008
        refresh: Refresh = Refresh(),  # noqa: B008
        guard: Guard = Guard(),  # noqa: B008
        largest: int | None = 4096,
        outputs: Callable[[Any], Any] | None = None,
        strict: bool = False,
    ) -> None:
        settings = {
            "outputs": outputs,
            "strict": strict,
            "curvature": curvature,
            "inversion": inversion,
            "damping": damping,
            "step_size": step_size,
            "refresh": refresh,
            "guard": guard,
            "largest": largest,
        }
        check_kinds(damping=damping, step_size=step_size, refresh=refresh, guard=guard)
        if curvature != "auto" and isinstance(estimator_of(curvature), BlockHessian):
            raise ValueError("a Hessian need not be positive; choose 'kfra', 'kflr' or 'kfac'.")
        check_largest(largest)
        if inversion not in ("factored", "exact"):
            raise ValueError(f"inversion is 'factored' or 'exact', not {inversion!r}")
        super().__init__(model, criterion, params, lr, weight_decay, guard.patience, settings)

    step_size: StepSize

    def _begin(self) -> None:
        super()._begin()
        self._many_layers: bool | None = None

    def update(
        self,
        observations: Sequence[Observation],
        gradient: Gradient,
        before: Tensor,
        progress: Progress,
    ) -> None:
        """One update of the paper's algorithm."""
        rules.note_surprise(float(before), progress)
        with self._watch("damping"):
            if self._last_step_failed(observations, float(before), progress.t - 1, progress):
                return
            if self._lost(observations, before, progress):
                return
        note_followed(self._most_carried(), progress)
        self._smooth(gradient, progress)
        with self._watch("curvature"):
            fresh = self._estimate(observations, progress)
        if progress.tau == 0:
            with self._watch("first damping"):
                self._find_damping(observations, gradient, before, progress)
        with self._watch("inversion"):
            self._invert_if_due(fresh, progress)
        with self._watch("step size"):
            proposal = self._choose(observations, gradient, before, progress)
        with self._watch("damping"):
            self._take(observations, gradient, proposal, before, progress)

    # Direction and step size

    def _choose(
        self,
        observations: Sequence[Observation],
        gradient: Gradient,
        before: Tensor,
        progress: Progress,
    ) -> Proposal:
        """The step to take, with the best γ of three where that is due (appendix B.3)."""
        search = self.damping.gamma == "search" and progress.t % self.damping.gamma_interval == 0
        if not search:
            return self._propose(observations, gradient, before, self._inverses, progress)
        tried, progress.written_out = [], False
        for gamma in rules.gamma_candidates(progress, self.damping):
            inverses = dict(self._each_inverse(gamma, progress))
            proposal = self._propose(observations, gradient, before, inverses, progress)
            tried.append((float(proposal.predicted()), gamma, inverses, proposal))
        _, progress.gamma, self._inverses, proposal = min(tried, key=lambda part: part[0])
        progress.inverted_with = progress.gamma
        return proposal

    def _propose(
        self,
        observations: Sequence[Observation],
        gradient: Gradient,
        before: Tensor,
        inverses: dict[str, Inverse],
        progress: Progress,
    ) -> Proposal:
        """δ̃ = −S C̃⁻¹ ḡ, and how much of it the quadratic model wants (appendix B.1, B.2)."""
        calibrate = self._calibrates(observations[0], progress)
        scales = self._known_scales() if calibrate and progress.age else {}
        direction = {
            group.name: inverses[group.name]
            .solve(source)
            .to(source.dtype)
            .mul_(-scales[group.name].to(source.dtype) if scales else -1.0)
            for group in self._observer.theta
            for source in [self._source(group, gradient)]
        }
        previous = self._previous() if self.step_size.momentum else None
        shift = self._shift(progress.tau)
        sizes, believed = self.step_size, rules.believed(progress)
        allowed = self._allowed(observations, float(before))
        noisy = shortened(sizes.share, progress.carried)
        share = share_of_step(noisy, self.refresh.early, progress, self.damping)
        looks = looks_at(observations, sizes)
        if scales or not calibrate:
            looks = self._expecting(observations, looks, gradient, scales, progress)
            most = sizes.most if scales else math.inf
            return plain(
                gradient, direction, previous, looks, shift, share, most, believed, allowed
            )
        return calibrated(
            gradient,
            direction,
            previous,
            looks,
            shift,
            observations[0].passage.trained,
            partial(self._blend, self.step_size.memory ** self.refresh.interval(progress.t)),
            sizes.most,
            share,
            sizes.favour,
            believed,
            allowed,
        )

    def _expecting(
        self,
        observations: Sequence[Observation],
        looks: list[Gram],
        gradient: Gradient,
        scales: Mapping[str, Tensor],
        progress: Progress,
    ) -> list[Gram]:
        """Looks at the direction's curvature, where one is due; else what is to be expected.

        Always looks where there is more than one direction, of which one has to be chosen.
        """
        several = self.step_size.momentum or self.damping.gamma == "search" or len(self._rates) > 1
        if self.step_size.ask == 1 or several:
            return looks

        def of_blocks(direction: Matrices) -> Tensor:
            """dᵀ C̃ d of d = −S C̃⁻¹ ḡ, S having the layers' scales."""
            terms = [
                dot(self._source(self._observer.theta[name], gradient), d) * scales.get(name, 1.0)
                for name, d in direction.items()
            ]
            return -torch.stack(terms).sum()

        due = self._rho_is_due(progress) or look_is_due(observations, self.step_size, progress)
        return expecting(looks, of_blocks, due, progress)

    def _allowed(self, observations: Sequence[Observation], before: float) -> float:
        """The greatest fall that a step may promise: a share of a loss that is never below zero."""
        known = all(observation.record.geometry.nonnegative for observation in observations)
        return self.step_size.promise * before if known and before > 0 else math.inf

    def _known_scales(self) -> dict[str, Tensor]:
        """Each layer's scale, where all of them are known."""
        names = [group.name for group in self._observer.theta]
        logs = [self._layer_state(name).get("log_scale") for name in names]
        known = {n: s.exp() for n, s in zip(names, logs, strict=True) if s is not None}
        finite = all(bool(s.isfinite()) for s in known.values())
        return known if finite and len(known) == len(names) else {}

    def _smooth(self, gradient: Gradient, progress: Progress) -> None:
        """Take ∇f into the running means ḡ."""
        if not self.step_size.smooth:
            return
        memory = rules.memory_of_gradients(self.step_size.smooth, progress, self.damping)
        for group in self._observer.theta:
            state, fresh = self._layer_state(group.name), gradient.parts(group)
            smooth(state, group, fresh, progress.t, memory)

    def _source(self, group: Group, gradient: Gradient) -> Tensor:
        """What the direction of a layer is made of: ḡ, or ∇f itself."""
        if not self.step_size.smooth:
            return gradient[group.name]
        return smoothed(self._layer_state(group.name), group)

    def _calibrates(self, observation: Observation, progress: Progress) -> bool:
        """Whether layers are calibrated: not if that costs far more than the rest of an update.

        It is decided where curvature is fresh, which had to look at the structure of layers: in
        between that would take another forward pass where it is no chain.
        """
        if progress.age == 0 or self._many_layers is None:
            passage = observation.passage
            most = self.step_size.layers
            self._many_layers = isinstance(passage, Network) and len(passage.trained) > most
        return self.step_size.calibrate and not self._many_layers

    def _most_carried(self) -> float:
        """The greatest μ: none where noise is not looked at, or averages are too coarse to move."""
        coarse = any(p.dtype.itemsize < 4 for p in self._parameters())
        if self.step_size.momentum or coarse or not self.damping.anneal or not self.refresh.average:
            return 0.0
        return self.step_size.carry * min(max(self._rates), 1.0)

    def _average_memory(self, t: int, carried: float) -> float:
        return window(memory_at(t, self.refresh.average, self.refresh.last), carried)

    def _prime(self) -> None:
        super()._prime()
        for group in self._observer.theta:
            state, like = self._layer_state(group.name), next(iter(group.parameters.values()))
            if self.step_size.smooth:
                wide = widened(like.detach())
                state.setdefault("gradient", wide.new_zeros(group.rows, group.columns))
            if self.step_size.calibrate:
                empty = like.new_full((), math.nan, dtype=torch.float64)
                state.setdefault("log_scale", empty)

    def _blend(self, memory: float, name: str, own: Tensor) -> Tensor:
        """The running geometric mean of a layer's own step size, as a logarithm."""
        past = self._layer_state(name).get("log_scale", own).to(own)
        past = past.where(past.isfinite(), own)
        blended = past + (1 - memory) * (own - past)
        # A layer without a gradient says nothing, and must not spoil the others.
        return blended.where(own.isfinite(), past).nan_to_num(0.0, 0.0, 0.0)

    # Damping, and the step

    def _find_damping(
        self,
        observations: Sequence[Observation],
        gradient: Gradient,
        before: Tensor,
        progress: Progress,
    ) -> None:
        """τ₀ and γ₀: of a few, the least with which the first step is nearly the best."""
        blocks = self._blocks()
        if rules.mean_eigenvalue(blocks) <= 0 and self.damping.tau is None:
            raise FactorisationError(
                "the curvature of the first batch is zero in every layer: the criterion is linear "
                "in the outputs, as an absolute error is, or saturated, or its weight is zero, or "
                "the inputs are. There is no Gauss-Newton step; use another criterion or a "
                "first-order optimiser until there is curvature."
            )
        scarcity = batches_wanted(observations, self._limit)
        candidates = rules.first_candidates(blocks, scarcity, self.damping)
        if len(candidates) == 1:
            rules.start(candidates[0], progress)
            return
        falls = {}
        for tau in candidates:
            rules.start(tau, progress)
            inverses = dict(self._each_inverse(tau, progress))
            proposal = self._propose(observations, gradient, before, inverses, progress)
            fall = float(before - self._evaluate_after(observations, proposal.update))
            falls[tau] = fall if math.isfinite(fall) else -math.inf
            if rules.past_the_best(falls):
                break
        rules.start(rules.best_first(falls), progress)

    def _take(
        self,
        observations: Sequence[Observation],
        gradient: Gradient,
        proposal: Proposal,
        before: Tensor,
        progress: Progress,
    ) -> None:
        """Take the step, and see what follows from ρ for τ and for the step (appendix B.3)."""
        step = self._times_lr(proposal.update)
        predicted = self._predicted(proposal, step, gradient, progress.tau)
        rho, actual, kept, due = None, None, True, self._rho_is_due(progress)
        start = self._keep_start()
        if not math.isfinite(float(predicted)):
            kept = False
        elif due and abs(float(predicted)) > self._resolution(observations, progress):
            self._move(step)
            try:
                actual = self._evaluate(observations) - before
            except BaseException:
                self._restore(start)
                raise
            rho = float(actual / predicted)
            progress.last_after = float(before + actual)
            kept = not self.guard.refuse or rho >= -self.guard.tolerance
            if kept:
                rules.adapt_tau(rho, float(proposal.damped), progress, self.damping)
            else:
                self._restore(start)
        else:
            self._move(step)
        if kept:
            self._remember(float(before), float(predicted), progress)
            rules.note_promise(float(proposal.predicted()), progress)
            note_fitted(float(proposal.whole()), float(before), progress)
            for name, scale in proposal.scales.items():
                self._layer_state(name)["log_scale"] = scale
        else:
            progress.last_after, progress.carried = None, 0.0
            self._refuse(progress)
        self._diagnose(proposal, before, predicted, actual, rho, progress)

    def _rho_is_due(self, progress: Progress) -> bool:
        return progress.look or progress.t % self.damping.interval(progress.t) == 0

    def _predicted(
        self,
        proposal: Proposal,
        step: Matrices,
        gradient: Gradient,
        tau: float,
    ) -> Tensor:
        """What the quadratic model says of the step as it is taken, learning rates included."""
        if len(self._rates) == 1:
            return proposal.predicted(*self._rates)
        along = {name: part.unsqueeze(0) for name, part in step.items()}
        gram = proposal.gram(None, along)
        return inner(gradient, step) + 0.5 * (gram + squared(step, self._shift(tau))).squeeze()

    def _diagnose(
        self,
        proposal: Proposal,
        before: Tensor,
        predicted: Tensor,
        actual: Tensor | None,
        rho: float | None,
        progress: Progress,
    ) -> None:
        self._diagnostics = {
            "loss": before,
            "predicted": predicted,
            "actual": actual,
            "rho": rho,
            "alpha": proposal.coefficients[0],
            "momentum": proposal.coefficients[1] if len(proposal.coefficients) > 1 else 0.0,
            "scales": {name: s.exp() for name, s in proposal.scales.items()},
        } | progress.shown()
