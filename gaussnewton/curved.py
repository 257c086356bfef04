"""What ``gn.GaussNewton`` keeps of curvature: running blocks, and their damped inverses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gaussnewton import damping as rules
from gaussnewton.blocks import Block, Inverse, Inversion
from gaussnewton.compiled import original
from gaussnewton.errors import NonFiniteError
from gaussnewton.estimators import ESTIMATORS, KFAC, Estimator, choose, estimator_of
from gaussnewton.estimators.eigenvalues import Eigenvalues
from gaussnewton.explaining import actual, table
from gaussnewton.foreseen import Foreseen, foreseen_blocks
from gaussnewton.guarding import GuardedOptimizer
from gaussnewton.observer import Observation
from gaussnewton.passage import refuse_loose
from gaussnewton.precision import bfloat16_pays, has_float64, too_narrow
from gaussnewton.progress import Progress
from gaussnewton.proposal import Shift
from gaussnewton.running import blocks_of, careful_inverse, store, stored
from gaussnewton.scarcity import batches_to_agree, batches_wanted
from gaussnewton.settings import Refresh


class CurvedOptimizer(GuardedOptimizer):
    """Estimates blocks of curvature when they are due, averages and inverts them.

    They are part of the state that is saved; the inverses are made again where they are missing.
    """

    curvature: str | Estimator
    inversion: Inversion
    refresh: Refresh
    largest: int | None
    strict: bool

    def _begin(self) -> None:
        super()._begin()
        self._estimator: Estimator | None = None
        self._reason = "by cost" if self.curvature == "auto" else "as asked for"
        self._inverses: dict[str, Inverse] = {}

    def _estimate(self, observations: Sequence[Observation], progress: Progress) -> bool:
        """Running averages of Q and G, when they are due; returns whether they changed."""
        progress.age += 1
        if progress.age < self.refresh.interval(progress.t) and self._blocks():
            return False
        progress.age = 0
        if self.strict:
            for observation in observations:
                refuse_loose(observation.passage)
        theta = self._observer.theta
        try:
            enough = batches_wanted(observations, self._limit)
            wanted = max(enough, batches_to_agree(progress.spread))
            memory = self.refresh.memory(progress.t, wanted)
            estimator = self._chosen_estimator(observations[0])
            progress.wide = progress.wide or self._must_be_wide()
            if progress.wide:
                estimator = estimator.with_precision(torch.float64)
            for name, fresh in blocks_of(observations, estimator):
                store(self._layer_state(name), theta[name], fresh, memory)
        except NonFiniteError:  # the loss is finite, but something behind it is not
            progress.mended += 1
            if not self._blocks():
                raise
            return False
        return True

    def _chosen_estimator(self, observation: Observation) -> Estimator:
        if self._estimator is None:
            chosen = self.param_groups[0].get("chosen")
            if self.curvature == "auto" and chosen is None:
                choice = choose(observation.passage, self.largest)
                self._estimator, self._reason = choice.estimator, choice.reason
                name = next(n for n, kind in ESTIMATORS.items() if kind is type(choice.estimator))
                self.param_groups[0]["chosen"] = [name, choice.reason]
            elif self.curvature == "auto" and chosen:  # a resumed run stays with what it began with
                self._estimator, self._reason = estimator_of(chosen[0]), chosen[1]
            else:
                self._estimator = estimator_of(self.curvature)
            self._estimator = self._estimator.with_largest(self.largest)
            saved = self.param_groups[0].get("random_state")
            if isinstance(self._estimator, KFAC) and saved is not None:
                self._estimator.set_random_state(saved, observation.record.outputs.device)
        return self._estimator

    def _blocks(self) -> dict[str, Block]:
        """The running blocks; none if a layer has none, or has changed its shape."""
        blocks = {}
        for group in self._observer.theta:
            block = stored(self._layer_state(group.name), group)
            if block is None:
                return {}
            blocks[group.name] = block
        return blocks

    def _invert_if_due(self, fresh: bool, progress: Progress) -> None:
        due = progress.age % self.refresh.inverse == 0 and rules.has_moved(progress)
        if fresh or due:
            self._invert(progress)
        elif not self._inverses:  # a loaded or copied optimiser goes on as it was
            self._inverses = dict(self._each_inverse(progress.inverted_with, progress))

    def _damping_raised(self, progress: Progress) -> None:
        self._invert(progress)

    def _invert(self, progress: Progress) -> None:
        for name in self._inverses.keys() - self._observer.theta.groups.keys():
            del self._inverses[name]  # of layers that are frozen now
        progress.written_out = self.refresh.many_solves(progress.t)
        if rules.has_moved(progress):
            progress.bend = 0.0  # it was found with another γ
        for name, inverse in self._each_inverse(progress.gamma, progress):
            self._inverses[name] = inverse  # one by one, so that few are there twice
        progress.inverted_with = progress.gamma
        kappa = max(inverse.condition for inverse in self._inverses.values())
        progress.wide = progress.wide or self._must_be_wide(kappa)

    def _each_inverse(self, gamma: float, progress: Progress) -> Iterator[tuple[str, Inverse]]:
        """C̃⁻¹ with k = γ + η added to each block."""
        for name, block in self._blocks().items():
            damping, choices = gamma + self._eta(name), self._applied_in(name, progress)
            last = self._inverses.get(name)
            yield (
                name,
                careful_inverse(name, block, damping, self.inversion, choices, last, progress),
            )

    def _must_be_wide(self, kappa: float = 1.0) -> bool:
        """Whether curvature is to be estimated and inverted in float64 from now on.

        Args:
            kappa: the greatest of the factors in use (:mod:`gaussnewton.precision`).
        """
        if not has_float64(next(self._parameters()).device):
            return False
        wanted = {"auto": too_narrow(kappa), "float32": False, "float64": True}
        return wanted[self.refresh.precision]

    def _applied_in(self, name: str, progress: Progress) -> list[torch.dtype]:
        """The precisions in which a layer's inverse may be applied, the narrowest first."""
        p = next(iter(self._observer.theta[name].parameters.values()))
        if self.refresh.precision != "auto" or p.dtype == torch.float64:
            return []
        if progress.narrow is None and progress.written_out:  # a resumed run stays with it
            progress.narrow = bfloat16_pays(p.device)
        return [torch.bfloat16] * bool(progress.narrow) + [torch.float32]

    def _shift(self, tau: float) -> Shift:
        """What Ḡ gets on its diagonal: τ + η, by parameter in layers where η is not one number."""
        result: Shift = {}
        for group in self._observer.theta:
            etas = {key: self._setting(p, "weight_decay") for key, p in group.parameters.items()}
            same = len(set(etas.values())) == 1
            result[group.name] = (
                tau + self._eta(group.name)
                if same
                else group.matrix(
                    {
                        key: torch.full_like(p, tau + etas[key], dtype=torch.float64)
                        for key, p in group.parameters.items()
                    }
                )
            )
        return result

    def _prime(self) -> None:
        super()._prime()
        foreseen = self._foreseen()
        for group in self._observer.theta:
            state, like = self._layer_state(group.name), next(iter(group.parameters.values()))
            if "estimates" not in state:
                for key, part in foreseen[group.name].block.numbers().items():
                    state[key] = torch.zeros_like(part, device=like.device)
                state["estimates"] = 0

    def explain(self) -> str:
        """What each parameter gets, what it costs and why, as a table.

        Before the first step it is what is to be expected of the modules; see
        :func:`~gaussnewton.explain`.

        Example:
            >>> import torch, gaussnewton as gn
            >>> model, criterion = torch.nn.Linear(3, 2), torch.nn.MSELoss()
            >>> print(gn.GaussNewton(model, criterion, curvature="kfra").explain())
            parameters    matrix    block      memory    to invert    note
            ------------  --------  ---------  --------  -----------  ------
            weight, bias  2 x 4     Kronecker      80 B           72
            curvature: KFRA, as asked for; inversion: factored
        """
        estimator, reason = self._estimator, self._reason
        if estimator is None and self.curvature != "auto":
            estimator = estimator_of(self.curvature)
        method = "chosen at the first step" if estimator is None else type(estimator).__name__
        foreseen = self._foreseen()
        for name, block in self._blocks().items():
            foreseen[name] = actual(foreseen[name], block)
        return (
            f"{table(self._observer.theta, foreseen)}\n"
            f"curvature: {method}, {reason}; inversion: {self.inversion}"
        )

    def _foreseen(self) -> dict[str, Foreseen]:
        """The kind of block of each group, as far as it is known before the first step."""
        return foreseen_blocks(
            original(self.model), self._observer.theta, self._eigenvalues, self._limit
        )

    @property
    def _limit(self) -> int | None:
        named = "kfra" if self.curvature == "auto" else self.curvature
        return estimator_of(named).with_largest(self.largest).largest

    @property
    def _eigenvalues(self) -> Eigenvalues:
        return "factored" if self.curvature == "auto" else estimator_of(self.curvature).eigenvalues

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
