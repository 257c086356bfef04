"""``gn.GaussNewton``: the paper's algorithm as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from gaussnewton.blocks import Inverse, Inversion, KroneckerBlock
from gaussnewton.errors import FactorisationError, NonFiniteError
from gaussnewton.estimators import KFAC, Estimator, estimator_of
from gaussnewton.observer import Observation
from gaussnewton.observing import Matrices, ObservingOptimizer, inner
from gaussnewton.progress import Progress
from gaussnewton.quadratic import Quadratic, gauss_newton_gram
from gaussnewton.settings import Damping, Guard, Refresh, StepSize

FEW_OUTPUTS = 16
"""Up to so many outputs KFLR costs little more than KFRA, and is exact."""

FIRST_MULTIPLES = (10.0, 100.0, 1000.0, 10_000.0)
"""Of the mean curvature: what is tried for τ on the first batch."""

GOOD_RHO = 0.5
"""The share of the predicted fall in loss with which a first step is good."""


@dataclass(frozen=True)
class Proposal:
    """A step that could be taken, and the quadratic model that proposes it."""

    update: Matrices
    model: Quadratic
    coefficients: Tensor
    scales: dict[str, Tensor] | None


class GaussNewton(ObservingOptimizer):
    """Gauss-Newton steps in place of ``torch.optim.Adam``, with nothing to tune.

    The loop stays as it is: the optimiser watches the model's and the criterion's calls.

    Args:
        model: a network that :func:`~gaussnewton.curvature` can handle.
        criterion: the loss module that the loop calls. Wrap a plain function once:
            ``criterion = gn.Loss(fn)``.
        params: parameters or parameter groups to train, as for any optimiser; by default
            all that require gradients.
        lr: scales every step. 1 is the step of the quadratic model; schedulers may lower it.
        weight_decay: η, an L2 penalty η/2 ‖θ‖² on the parameters. It is part of the model's
            curvature, not a shrinkage beside it.
        curvature: "kfra", "kflr", "kfac" or an estimator. "auto" takes KFLR for few outputs
            and KFRA for many.
        inversion: "factored", or "exact" by eigendecompositions, which costs more.
        damping: how τ and γ start and move.
        step_size: how far to go.
        refresh: how often curvature is estimated and inverted.
        guard: what to do when something goes wrong.

    Example:
        >>> import torch, gaussnewton as gn
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(),
        ...                             torch.nn.Linear(8, 1))
        >>> criterion = torch.nn.MSELoss()
        >>> optimizer = gn.GaussNewton(model, criterion)
        >>> x = torch.randn(64, 4)
        >>> y = x.prod(1, keepdim=True)
        >>> for _ in range(40):
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
        criterion: nn.Module,
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
    ) -> None:
        settings = {
            "curvature": curvature,
            "inversion": inversion,
            "damping": damping,
            "step_size": step_size,
            "refresh": refresh,
            "guard": guard,
        }
        super().__init__(model, criterion, params, lr, weight_decay, guard.patience, settings)

    curvature: str | Estimator
    inversion: Inversion
    damping: Damping
    step_size: StepSize
    refresh: Refresh
    guard: Guard

    def _begin(self) -> None:
        super()._begin()
        self._estimator: Estimator | None = None
        self._inverses: dict[str, Inverse] = {}

    def update(
        self,
        observations: Sequence[Observation],
        gradient: Matrices,
        before: Tensor,
        progress: Progress,
    ) -> None:
        """One update of the paper's algorithm."""
        self._estimate(observations, progress)
        proposal = self._choose(observations, gradient, before, progress)
        self._move(proposal.update)
        self._judge(observations, proposal, before, progress)

    # Curvature and its inverse

    def _estimate(self, observations: Sequence[Observation], progress: Progress) -> None:
        """Running averages of Q and G, and their inverses, when they are due."""
        estimate = (progress.t - 1) % self.refresh.curvature == 0 or not self._blocks()
        if estimate:
            try:
                for name, block in self._fresh_blocks(observations).items():
                    self._store(name, block)
            except NonFiniteError:  # the loss is finite, but something behind it is not
                progress.mended += 1
                if not self._blocks():
                    raise
        if progress.tau == 0:
            return  # the first batch: the damping comes first
        if estimate or (progress.t - 1) % self.refresh.inverse == 0:
            self._invert(progress)
        elif not self._inverses:  # a loaded or copied optimiser goes on as it was
            self._inverses = self._inverses_with(progress.inverted_with, progress)

    def _fresh_blocks(self, observations: Sequence[Observation]) -> dict[str, KroneckerBlock]:
        """The blocks of f, of all observed passes together."""
        estimator = self._chosen_estimator(observations[0])
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

    def _store(self, name: str, fresh: KroneckerBlock) -> None:
        """Average a fresh block into the running one, which is a plain mean at first."""
        state = self._layer_state(name)
        count = state.get("estimates", 0) + 1
        decay = min(self.refresh.decay, 1 - 1 / count)
        if count > 1:
            fresh = KroneckerBlock(state["Q"], state["G"]).average(fresh, decay)
        state.update(Q=fresh.Q, G=fresh.G, estimates=count)

    def _blocks(self) -> dict[str, KroneckerBlock]:
        states = {name: self._layer_state(name) for name in self._observer.theta.groups}
        if any("Q" not in state for state in states.values()):
            return {}
        return {name: KroneckerBlock(state["Q"], state["G"]) for name, state in states.items()}

    def _invert(self, progress: Progress) -> None:
        progress.inverted_with = progress.gamma
        self._inverses = self._inverses_with(progress.gamma, progress)

    def _inverses_with(self, gamma: float, progress: Progress) -> dict[str, Inverse]:
        return {
            name: self._inverse(name, block, gamma + self._eta(name), progress)
            for name, block in self._blocks().items()
        }

    def _inverse(
        self, name: str, block: KroneckerBlock, damping: float, progress: Progress
    ) -> Inverse:
        """A damped inverse; where factorising fails, a more careful one, or the last one."""
        wide = KroneckerBlock(block.Q.double(), block.G.double())
        for candidate, amount in ((block, 1), (block, 10), (wide, 10), (wide, 1000)):
            try:
                return candidate.invert(amount * damping, self.inversion)
            except (FactorisationError, RuntimeError):  # torch's LinAlgError is one
                progress.mended += 1
        if name in self._inverses:
            return self._inverses[name]
        raise FactorisationError(
            f"the curvature of layer '{name}' could not be inverted, not even in float64 with a "
            f"thousand times the damping {damping:.3g}. Look at what enters the layer."
        )

    # Direction and step size

    def _choose(
        self,
        observations: Sequence[Observation],
        gradient: Matrices,
        before: Tensor,
        progress: Progress,
    ) -> Proposal:
        """The step to take, after finding the damping where that is due."""
        if progress.tau == 0:
            self._find_damping(observations, gradient, before, progress)
        elif self.damping.gamma == "search" and progress.t % self.damping.gamma_interval == 0:
            return self._search_gamma(observations, gradient, progress)
        proposal = self._propose(observations, gradient, self._inverses, progress.tau)
        self._remember_scales(proposal)
        return proposal

    def _propose(
        self,
        observations: Sequence[Observation],
        gradient: Matrices,
        inverses: dict[str, Inverse],
        tau: float,
    ) -> Proposal:
        """δ̃ = −C̃⁻¹ ∇f, and how much of it the quadratic model wants (appendix B.1, B.2)."""
        direction = {name: -inverses[name].solve(g).to(g.dtype) for name, g in gradient.items()}
        previous = self._previous() if self.step_size.momentum else None
        if self.step_size.calibrate:
            return self._calibrated(observations, gradient, direction, previous, tau)
        stacks = [direction] if previous is None else [direction, previous]
        together = {name: torch.stack([d[name] for d in stacks]) for name in direction}
        gram = self._gram(observations, None, together)
        dots = torch.stack([torch.stack([self._dot(a, b, tau) for b in stacks]) for a in stacks])
        slopes = torch.stack([inner(gradient, d) for d in stacks])
        model = Quadratic(gram + dots, slopes)
        c = model.minimum()
        return Proposal(combine(c, stacks), model, c, None)

    def _calibrated(
        self,
        observations: Sequence[Observation],
        gradient: Matrices,
        direction: Matrices,
        previous: Matrices | None,
        tau: float,
    ) -> Proposal:
        """Scale each layer by its own exact line search, then solve for all together."""
        names = observations[0].chain.trained
        others = None if previous is None else {n: p.unsqueeze(0) for n, p in previous.items()}
        gram = self._gram(observations, direction, others)
        alone = [{name: direction[name]} for name in names]
        spans: list[Matrices] = [*alone, *([] if previous is None else [previous])]
        M = gram + torch.stack([torch.stack([self._dot(a, b, tau) for b in spans]) for a in spans])
        b = torch.stack([inner(gradient, d) for d in spans])
        layers = len(names)
        own = (-b[:layers] / M.diagonal()[:layers]).clamp(min=1e-12).log()
        scales = self._blend_scales(names, own)
        basis = torch.zeros(
            len(spans), 1 if previous is None else 2, dtype=M.dtype, device=M.device
        )
        basis[:layers, 0] = scales.exp()
        if previous is not None:
            basis[layers, 1] = 1
        model = Quadratic(M, b).project(basis)
        c = model.minimum()
        scaled = {
            name: direction[name] * scale.to(direction[name].dtype)
            for name, scale in zip(names, scales.exp(), strict=True)
        }
        stacks = [scaled] if previous is None else [scaled, previous]
        return Proposal(combine(c, stacks), model, c, dict(zip(names, scales, strict=True)))

    def _gram(
        self,
        observations: Sequence[Observation],
        layers: Matrices | None,
        others: Matrices | None,
    ) -> Tensor:
        settings = self.step_size
        return gauss_newton_gram(observations, layers, others, settings.part, settings.least)

    def _blend_scales(self, names: Sequence[str], own: Tensor) -> Tensor:
        """The running geometric mean of each layer's own step size, as logarithms."""
        memory = self.step_size.memory
        blended = []
        for name, new in zip(names, own, strict=True):
            old = self._layer_state(name).get("log_scale")
            blended.append(new if old is None else memory * old.to(new) + (1 - memory) * new)
        return torch.stack(blended)

    def _remember_scales(self, proposal: Proposal) -> None:
        for name, scale in (proposal.scales or {}).items():
            self._layer_state(name)["log_scale"] = scale

    # Damping

    def _find_damping(
        self,
        observations: Sequence[Observation],
        gradient: Matrices,
        before: Tensor,
        progress: Progress,
    ) -> None:
        """τ₀ and γ₀, from a range of multiples of the mean curvature.

        The least of those with which the first step lowers the loss about as much as the
        quadratic model says; a lower one may do better at once, but not for long.
        """
        blocks = self._blocks()
        size = sum(block.rows * block.columns for block in blocks.values())
        mean = float(torch.stack([b.trace() for b in blocks.values()]).sum()) / size
        if self.damping.tau is not None:
            best = self.damping.tau
        else:
            falls = {}
            for multiple in FIRST_MULTIPLES:
                tau = multiple * mean
                proposal = self._propose(
                    observations, gradient, self._inverses_with(tau, progress), tau
                )
                self._move(proposal.update)
                fall = float(before - self._evaluate(observations))
                self._move(proposal.update, -1.0)
                falls[tau] = fall if math.isfinite(fall) else -math.inf
                if fall >= -GOOD_RHO * float(proposal.model.change(proposal.coefficients)):
                    break
            else:
                tau = max(falls, key=lambda tau: falls[tau])
            best = tau
        progress.first_tau = progress.tau = progress.gamma = best
        self._invert(progress)

    def _search_gamma(
        self, observations: Sequence[Observation], gradient: Matrices, progress: Progress
    ) -> Proposal:
        """The best of {ω γ, γ, γ/ω} by the quadratic model (appendix B.3)."""
        omega = self.damping.decay**self.damping.gamma_interval
        best: tuple[float, float, dict[str, Inverse], Proposal] | None = None
        for gamma in (omega * progress.gamma, progress.gamma, progress.gamma / omega):
            gamma = self._bounded(gamma, progress)
            inverses = self._inverses_with(gamma, progress)
            proposal = self._propose(observations, gradient, inverses, progress.tau)
            change = float(proposal.model.change(proposal.coefficients))
            if best is None or change < best[0]:
                best = (change, gamma, inverses, proposal)
        assert best is not None
        _, progress.gamma, self._inverses, proposal = best
        progress.inverted_with = progress.gamma
        self._remember_scales(proposal)
        return proposal

    def _judge(
        self,
        observations: Sequence[Observation],
        proposal: Proposal,
        before: Tensor,
        progress: Progress,
    ) -> None:
        """ρ, and what follows from it for τ and for the step just taken (appendix B.3)."""
        lr = float(self.param_groups[0]["lr"])
        predicted = proposal.model.change(proposal.coefficients * lr)
        rho, actual = None, None
        due = progress.t % self.damping.tau_interval == 0 or progress.look
        if due and lr:
            after = self._evaluate(observations)
            actual = after - before
            rho = float(actual / predicted)
            progress.look = False
            if self.guard.refuse and not rho >= -self.guard.tolerance:
                self._take_back(proposal, progress)
            else:
                self._adapt_tau(rho, progress)
                self._remember(proposal.update)
        else:
            self._remember(proposal.update)
        self._diagnostics = {
            "loss": before,
            "predicted": predicted,
            "actual": actual,
            "rho": rho,
            "tau": progress.tau,
            "gamma": progress.gamma,
            "alpha": proposal.coefficients[0],
            "momentum": proposal.coefficients[1] if len(proposal.coefficients) > 1 else 0.0,
            "scales": {name: s.exp() for name, s in (proposal.scales or {}).items()},
            "refused": progress.refused,
            "skipped": progress.skipped,
            "mended": progress.mended,
            "t": progress.t,
        }

    def _adapt_tau(self, rho: float, progress: Progress) -> None:
        omega = self.damping.decay**self.damping.tau_interval
        if rho > self.damping.lower_above:
            progress.tau = self._bounded(progress.tau * omega, progress)
        elif rho < self.damping.raise_below:
            progress.tau = self._bounded(progress.tau / omega, progress)
        if self.damping.gamma == "tied":
            progress.gamma = progress.tau

    def _take_back(self, proposal: Proposal, progress: Progress) -> None:
        self._move(proposal.update, -1.0)
        omega = self.damping.decay ** (4 * self.damping.tau_interval)
        progress.tau = self._bounded(progress.tau / omega, progress)
        if self.damping.gamma == "tied":
            progress.gamma = progress.tau
        progress.refused += 1
        progress.look = True
        self._invert(progress)
        for p in self._parameters():
            self.state[p].pop("update", None)

    def _bounded(self, value: float, progress: Progress) -> float:
        low, high = self.damping.bounds
        return min(max(value, low * progress.first_tau), high * progress.first_tau)

    # What a user asks of it

    def explain(self) -> str:
        """A table of what each layer gets, and why."""
        method = self.curvature
        reason = "as asked for"
        if method == "auto":
            method = "kflr or kfra"
            reason = f"kflr for up to {FEW_OUTPUTS} outputs, where it costs little and is exact"
        if self._estimator is not None:
            method = type(self._estimator).__name__
        rows = [
            [group.name or "(model)", f"{group.rows} x {group.columns}", "Kronecker", str(method)]
            for group in self._observer.theta
        ]
        table = tabulate(rows, ["layer", "[W | b]", "block", "curvature"], disable_numparse=True)
        return f"{table}\ncurvature: {reason}; inversion: {self.inversion}"

    # torch.optim.Optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their layers' curvature is estimated at the next step."""
        super().add_param_group(param_group)
        self._inverses = {}

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers, for ``torch.load(weights_only=True)``."""
        self._note_random_state()
        return super().state_dict()

    def _note_random_state(self) -> None:
        if isinstance(self._estimator, KFAC):
            self.param_groups[0]["random_state"] = self._estimator.random_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a saved run stopped, bit for bit."""
        super().load_state_dict(state_dict)
        self._inverses, self._estimator = {}, None

    def __getstate__(self) -> dict[str, Any]:
        self._note_random_state()
        return super().__getstate__()

    # Parameters and their state

    def _remember(self, update: Matrices) -> None:
        for group in self._observer.theta:
            for key, part in group.tensors(update[group.name]).items():
                p = group.parameters[key]
                self.state[p]["update"] = part * self._setting(p, "lr")

    def _previous(self) -> Matrices | None:
        """The last update, for momentum; None if there is none for some layer."""
        result = {}
        for group in self._observer.theta:
            parts = {key: self.state[p].get("update") for key, p in group.parameters.items()}
            if any(part is None for part in parts.values()):
                return None
            result[group.name] = group.matrix(parts)
        return result

    def _dot(self, a: Matrices, b: Matrices, tau: float) -> Tensor:
        """aᵀ (τ + η) b, over the layers that both have."""
        terms = [
            (tau + self._eta(name)) * (a[name].double() * b[name].double()).sum()
            for name in a
            if name in b
        ]
        like = next(iter(a.values()))
        return torch.stack(terms).sum() if terms else like.new_zeros((), dtype=torch.float64)

    def _chosen_estimator(self, observation: Observation) -> Estimator:
        if self._estimator is None:
            method = self.curvature
            if method == "auto":
                few = observation.record.outputs[0].numel() <= FEW_OUTPUTS
                method = "kflr" if few else "kfra"
            self._estimator = estimator_of(method)
            saved = self.param_groups[0].get("random_state")
            if isinstance(self._estimator, KFAC) and saved is not None:
                self._estimator.set_random_state(saved, observation.record.outputs.device)
        return self._estimator


def combine(c: Tensor, stacks: Sequence[Matrices]) -> Matrices:
    """Σ c_i d_i."""
    return {
        name: sum(
            (s.to(d[name].dtype) * d[name] for s, d in zip(c[1:], stacks[1:], strict=True)),
            start=c[0].to(stacks[0][name].dtype) * stacks[0][name],
        )
        for name in stacks[0]
    }
