"""``gn.HessianFree``: the full Gauss-Newton step by conjugate gradients (Martens 2010)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gaussnewton.blocks import Block
from gaussnewton.chain import Chain
from gaussnewton.estimators import KFAC, KFRA
from gaussnewton.exact import ConjugateGradientsResult, conjugate_gradients
from gaussnewton.gradients import Gradient
from gaussnewton.jacobian import gauss_newton_product
from gaussnewton.matrices import Matrices
from gaussnewton.observer import Observation
from gaussnewton.observing import ObservingOptimizer
from gaussnewton.progress import Progress

LEAST, MOST = 1e-10, 1e10
"""The bounds of τ, as multiples of the first."""


class HessianFree(ObservingOptimizer):
    """Solves (Ḡ + (τ + η) I) δ = −∇f by conjugate gradients at every step.

    What the paper compares with: exact curvature of the batch, many products a step. The
    iteration stops by Martens' rule of relative progress, starts from the last solution,
    and of its iterates the one is taken with which the loss itself, not the model, is
    lowest. τ follows ρ as in Levenberg and Marquardt's method.

    Args:
        model: as for :class:`~gaussnewton.GaussNewton`.
        criterion: as there.
        params: parameters or groups; by default all that require gradients.
        lr: scales every step.
        weight_decay: η.
        damping: τ at the start, as a multiple of the mean eigenvalue of Ḡ's Kronecker
            approximation on the first batch.
        iterations: the most iterations a step.
        warm_start: the last solution, times this, is where the next iteration starts.
        precondition: with KFRA's damped blocks, which costs their inversion. It helps where
            τ is low, and not where it is high.
        patience: how many steps in a row may be skipped for numbers that are not finite.
        outputs: as for :class:`~gaussnewton.GaussNewton`.

    Example:
        >>> import torch, gaussnewton as gn
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(),
        ...                             torch.nn.Linear(8, 1))
        >>> criterion = torch.nn.MSELoss()
        >>> optimizer = gn.HessianFree(model, criterion)
        >>> x = torch.randn(64, 3)
        >>> y = x.sum(1, keepdim=True).sin()
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     loss = criterion(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        >>> bool(criterion(model(x), y) < 0.1)
        True
    """

    iterations: int
    warm_start: float
    precondition: bool
    damping: float

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module | None = None,
        params: Iterable[Any] | None = None,
        *,
        lr: float = 1.0,
        weight_decay: float = 0.0,
        damping: float = 100.0,
        iterations: int = 250,
        warm_start: float = 0.95,
        precondition: bool = False,
        patience: int = 10,
        outputs: Callable[[Any], Any] | None = None,
    ) -> None:
        settings = {
            "outputs": outputs,
            "damping": damping,
            "iterations": iterations,
            "warm_start": warm_start,
            "precondition": precondition,
        }
        super().__init__(model, criterion, params, lr, weight_decay, patience, settings)

    def update(
        self,
        observations: Sequence[Observation],
        gradient: Gradient,
        before: Tensor,
        progress: Progress,
    ) -> None:
        """One step of the Hessian-free method."""
        blocks = self._blocks(observations) if self.precondition or progress.tau == 0 else {}
        if progress.tau == 0:
            size = sum(block.rows * block.columns for block in blocks.values())
            mean = float(torch.stack([b.trace() for b in blocks.values()]).sum()) / size
            progress.tau = progress.first_tau = self.damping * mean
        matrices = dict(gradient)
        g = self._flat(matrices)
        product = self._product(observations, progress.tau)
        result = conjugate_gradients(
            product,
            -g,
            x0=self._last_solution(matrices),
            preconditioner=self._preconditioner(blocks, progress.tau)
            if self.precondition
            else None,
            max_iterations=self.iterations,
            stopping="martens",
            keep_iterates=True,
        )
        self._remember(result.solution)
        chosen, after = self._backtrack(observations, result, before)
        step = self._flat(self._times_lr(self._matrices(chosen)))
        predicted = g @ step + 0.5 * step @ product(step)
        if abs(float(predicted)) > self._resolution(observations, progress):
            self._adapt(float((after - before) / predicted), progress)
        self._diagnostics = {
            "loss": before,
            "predicted": predicted,
            "actual": after - before,
            "rho": (after - before) / predicted,
            "tau": progress.tau,
            "iterations": result.iterations,
            "stopped": str(result.reason.value),
            "skipped": progress.skipped,
            "refused": progress.refused,
            "t": progress.t,
        }

    def _product(
        self, observations: Sequence[Observation], tau: float
    ) -> Callable[[Tensor], Tensor]:
        def product(v: Tensor) -> Tensor:
            direction = self._matrices(v)
            total = self._flat({name: (tau + self._eta(name)) * V for name, V in direction.items()})
            for observation in observations:
                assert observation.factor is not None
                part = self._flat(gauss_newton_product(observation.passage, direction))
                total = total + observation.factor.to(part.dtype) * part
            return total

        return product

    def _backtrack(
        self,
        observations: Sequence[Observation],
        result: ConjugateGradientsResult,
        before: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Of the iterates, from the last back, the first before the loss rises again.

        If even that does not lower the loss it is shortened until it does, and if nothing
        helps nothing is done.
        """
        candidates = [step for _, step in result.iterates] or [result.solution]
        best, least = candidates[-1], self._loss_along(observations, candidates[-1])
        for step in reversed(candidates[:-1]):
            value = self._loss_along(observations, step)
            if value >= least:
                break
            best, least = step, value
        for _ in range(12):
            if least < before:
                break
            best = 0.5 * best
            least = self._loss_along(observations, best)
        if not least < before:
            best, least = torch.zeros_like(best), before
        self._move(self._times_lr(self._matrices(best)))
        return best, least

    def _loss_along(self, observations: Sequence[Observation], step: Tensor) -> Tensor:
        value = self._evaluate_after(observations, self._times_lr(self._matrices(step)))
        return value if bool(value.isfinite()) else torch.full_like(value, torch.inf)

    def _adapt(self, rho: float, progress: Progress) -> None:
        """Martens' rule: 2/3 where the model is good, 3/2 where it is not."""
        if rho > 0.75:
            progress.tau = max(progress.tau * 2 / 3, LEAST * progress.first_tau)
        elif not rho >= 0.25:
            progress.tau = min(progress.tau * 3 / 2, MOST * progress.first_tau)

    def _blocks(self, observations: Sequence[Observation]) -> dict[str, Block]:
        observation = observations[0]
        assert observation.factor is not None
        factor = float(observation.factor) * len(observations)
        blocks = {}
        estimator = KFRA() if isinstance(observation.passage, Chain) else KFAC()
        for name, block in estimator.of(observation.passage).items():
            blocks[name] = block.scaled(factor)
        return blocks

    def _preconditioner(self, blocks: dict[str, Block], tau: float) -> Callable[[Tensor], Tensor]:
        inverses = {
            name: block.invert(tau + self._eta(name), "factored") for name, block in blocks.items()
        }
        return lambda r: self._flat(
            {name: inverses[name].solve(V) for name, V in self._matrices(r).items()}
        )

    def _last_solution(self, like: Matrices) -> Tensor:
        parts = {
            key: self.state[p].get("solution", torch.zeros_like(p))
            for group in self._observer.theta
            for key, p in group.parameters.items()
        }
        start = self.warm_start * self._observer.theta.vector(parts)
        return start.to(next(iter(like.values())).dtype)

    def _prime(self) -> None:
        super()._prime()
        for p in self._parameters():
            self.state[p].setdefault("solution", torch.zeros_like(p))

    def _remember(self, solution: Tensor) -> None:
        for group in self._observer.theta:
            matrix = self._observer.theta.matrices(solution)[group.name]
            for key, part in group.tensors(matrix).items():
                self.state[group.parameters[key]]["solution"] = part.clone()

    def _flat(self, matrices: Matrices) -> Tensor:
        return self._observer.theta.join(matrices)

    def _matrices(self, vector: Tensor) -> Matrices:
        return self._observer.theta.matrices(vector)
