"""What the optimisers of this package share: a torch optimiser that watches the loop it is in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gaussnewton.arguments import check_arguments
from gaussnewton.averaging import MEMORY, carry_on, without_last
from gaussnewton.errors import NonFiniteError, RecordError
from gaussnewton.gradients import Gradient
from gaussnewton.matrices import Matrices
from gaussnewton.observer import Observation, Observer
from gaussnewton.progress import Progress
from gaussnewton.timing import Stopwatch


class ObservingOptimizer(Optimizer):
    """An optimiser that knows the forward passes behind the gradients.

    A subclass says what to do with them in :meth:`update`; this class has the rest: the
    objective f, its gradient by layers, moving the parameters and evaluating f there,
    steps that are skipped, averaged parameters, and being saved, copied and loaded.

    Args:
        model: a network that :func:`~gaussnewton.curvature` can handle.
        criterion: the loss module that the loop calls; None for a model that calls its loss.
        params: parameters or groups; by default all that require gradients.
        lr: scales every step.
        weight_decay: η.
        patience: how many steps in a row may be skipped.
        settings: what else to keep when the optimiser is copied, by attribute.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module | None,
        params: Iterable[Any] | None,
        lr: float,
        weight_decay: float,
        patience: int,
        settings: dict[str, Any],
    ) -> None:
        check_arguments(model, criterion, lr, weight_decay)
        trained = [p for p in model.parameters() if p.requires_grad] if params is None else params
        super().__init__(trained, {"lr": lr, "weight_decay": weight_decay})
        self._settings = {"model": model, "criterion": criterion, "patience": patience, **settings}
        self.param_groups[0]["progress"] = Progress().as_dict()
        self._begin()

    def _begin(self) -> None:
        """What a new, copied or unpickled optimiser sets up."""
        for key, value in self._settings.items():
            setattr(self, key, value)
        self._check_parameters()
        self._observer = Observer(self.model, self.criterion, self.outputs)
        self._diagnostics: dict[str, Any] = {}
        self._watch = Stopwatch(torch.device("cpu"))

    model: nn.Module
    criterion: nn.Module | None
    outputs: Callable[[Any], Any] | None = None
    patience: int

    @abstractmethod
    def update(
        self,
        observations: Sequence[Observation],
        gradient: Gradient,
        before: Tensor,
        progress: Progress,
    ) -> None:
        """Change the parameters.

        Args:
            observations: the forward passes that the gradient came from.
            gradient: ∇f of each layer.
            before: f.
            progress: counters and damping, to be changed in place.
        """

    _step_supports_amp_scaling = True
    """A ``GradScaler`` then tells its scale in ``grad_scale``, which the observed losses carry
    too, and in ``found_inf`` whether a gradient overflowed."""

    grad_scaler: torch.amp.GradScaler | None = None
    """Needed only by loops that call ``scaler.unscale_(optimizer)`` themselves."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients and the forward passes since the last one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._watch = Stopwatch(next(self._parameters()).device)
        with self._watch("record"):
            self._check_parameters()
            observations = self._observer.take()
        progress = Progress(**self.param_groups[0]["progress"])
        if self._overflowed(observations):
            self._diagnostics = {}
            self._count_skipped(progress)
            return loss
        gradient = self._gradient()
        if not observations:
            self._check_nothing_to_do()
            self._prime()
            return loss
        before = self._objective([o.loss for o in observations], observations)
        self._diagnostics = {"loss": before}
        if self._usable(before, gradient):
            progress.t += 1
            progress.skipped_in_a_row = 0
            progress.greatest_loss = max(progress.greatest_loss, abs(float(before)))
            # In full precision, also where the loop's mixed precision reaches as far as here.
            with torch.autocast(before.device.type, enabled=False):
                self.update(observations, gradient, before, progress)
            self._average(observations, progress)
        elif not self.recover(observations, before, progress):
            self._skip(progress)
        self.param_groups[0]["progress"] = progress.as_dict()
        return loss

    def _overflowed(self, observations: Sequence[Observation]) -> bool:
        """Take a ``GradScaler``'s scale out of gradients and losses; or say that they are lost."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None:
            return False
        scale = getattr(self, "grad_scale", None)
        if scale is None:  # the gradients have been unscaled, the losses have not
            if self.grad_scaler is None:
                raise RecordError(
                    "scaler.unscale_(optimizer) was called, and after it the optimiser cannot know "
                    "the scale that the losses still carry. Tell it once, before the loop: "
                    "optimizer.grad_scaler = scaler."
                )
            scale = found_inf.new_tensor(self.grad_scaler.get_scale())
        else:
            for p in self._parameters():
                if p.grad is not None:
                    p.grad.div_(scale.to(p.grad.device))
        for observation in observations:
            assert observation.factor is not None
            observation.factor = observation.factor / scale.to(observation.factor.device)
        return bool(found_inf)

    def _gradient(self) -> Gradient:
        """∇f of each layer, the penalty's part η θ included."""
        return Gradient(self._observer.theta, lambda p: self._setting(p, "weight_decay"))

    def _objective(self, losses: Sequence[Tensor], observations: Sequence[Observation]) -> Tensor:
        """f: what was differentiated, with the penalty η/2 ‖θ‖²."""
        total = torch.zeros((), dtype=torch.float64, device=losses[0].device)
        for value, observation in zip(losses, observations, strict=True):
            assert observation.factor is not None
            total = total + observation.factor.double() * value.double()
        for p in self._parameters():
            eta = self._setting(p, "weight_decay")
            if eta:
                total = total + 0.5 * eta * p.double().square().sum()
        return total

    def _usable(self, before: Tensor, gradient: Gradient) -> bool:
        """Whether loss and gradient are finite."""
        return bool(before.isfinite() & gradient.finite().to(before.device))

    def recover(
        self,
        observations: Sequence[Observation],  # noqa: ARG002
        before: Tensor,  # noqa: ARG002
        progress: Progress,  # noqa: ARG002
    ) -> bool:
        """Undo what made loss or gradient not finite; returns whether anything was undone."""
        return False

    def _skip(self, progress: Progress) -> None:
        """Count a step that cannot be taken, and give up after too many in a row."""
        self._count_skipped(progress)
        progress.skipped_in_a_row += 1
        if progress.skipped_in_a_row > self.patience:
            raise NonFiniteError(
                f"{progress.skipped_in_a_row} steps in a row had a loss or gradient that is not "
                "finite. Nothing was changed in any of them; look at the data, or at what the "
                "model computes."
            )

    def _resolution(self, observations: Sequence[Observation], progress: Progress) -> float:
        """Changes of f below this are rounding, and say nothing of a step."""
        eps = max(torch.finfo(o.loss.dtype).eps for o in observations)
        return 10 * eps * progress.greatest_loss

    def _count_skipped(self, progress: Progress) -> None:
        progress.skipped += 1
        self.param_groups[0]["progress"] = progress.as_dict()
        self._diagnostics |= progress.shown()

    def _times_lr(self, update: Matrices) -> Matrices:
        """An update with each parameter's learning rate in it."""
        if all(float(group["lr"]) == 1 for group in self.param_groups):
            return update
        return {
            group.name: group.matrix(
                {
                    key: part * self._setting(group.parameters[key], "lr")
                    for key, part in group.tensors(update[group.name]).items()
                }
            )
            for group in self._observer.theta
        }

    def _move(self, step: Matrices) -> None:
        """θ ← θ + step."""
        for group in self._observer.theta:
            for key, part in group.tensors(step[group.name]).items():
                p = group.parameters[key]
                if p.dtype == part.dtype:
                    p.add_(part)
                else:
                    p.copy_(p.to(part.dtype) + part)  # only the sum is rounded

    def _snapshot(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._parameters()]

    def _restore(self, snapshot: Sequence[Tensor]) -> None:
        for p, value in zip(self._parameters(), snapshot, strict=True):
            p.copy_(value)

    def _evaluate_after(self, observations: Sequence[Observation], step: Matrices) -> Tensor:
        """f where a step would lead; the parameters stay as they are."""
        start = self._snapshot()
        try:
            self._move(step)
            return self._evaluate(observations)
        finally:  # also where somebody presses Ctrl-C
            self._restore(start)

    def _evaluate_at(self, observations: Sequence[Observation], place: Sequence[Tensor]) -> Tensor:
        """f at other parameters; the parameters stay as they are."""
        start = self._snapshot()
        try:
            self._restore(place)
            return self._evaluate(observations)
        finally:
            self._restore(start)

    def _evaluate(self, observations: Sequence[Observation]) -> Tensor:
        return self._objective([self._observer.evaluate(o) for o in observations], observations)

    def _average_memory(self, t: int, carried: float) -> float:  # noqa: ARG002
        return MEMORY

    def _average(self, observations: Sequence[Observation], progress: Progress) -> None:  # noqa: ARG002
        """Take the parameters into their averages, and carry them along where that is asked for."""
        t, memory = progress.t, self._average_memory(progress.t, progress.carried)
        for p in self._parameters():
            if "average" not in self.state[p]:
                self.state[p]["average"] = p.detach().clone()
            carry_on(self.state[p]["average"], p, t, memory, self._carried(p, progress))

    def _carried(self, p: nn.Parameter, progress: Progress) -> float:
        """μ of a parameter: less where its learning rate is, none where it had no part."""
        if p.grad is None or not p.requires_grad or not progress.carried:
            return 0.0
        return progress.carried * self._setting(p, "lr") / max(self._rates)

    @property
    def _rates(self) -> set[float]:
        return {float(group["lr"]) for group in self.param_groups}

    def _leave_out_of_average(self, t: int, progress: Progress) -> None:
        """Undo the average's last update, that of step t, with learning rates as they are now."""
        memory = self._average_memory(t, progress.carried)
        for p in self._parameters():
            state = self.state[p]
            if "average" in state:
                carried = self._carried(p, progress)
                earlier = without_last(state.pop("average"), p, t, memory, carried)
                if earlier is not None:
                    state["average"] = earlier

    def _prime(self) -> None:
        """Make the state that a step would make, as empty as it can be.

        ``torch.distributed.checkpoint`` fills in what it finds after a step with zero gradients.
        """
        for p in self._parameters():
            self.state[p].setdefault("average", p.detach().clone())

    def _check_nothing_to_do(self) -> None:
        if any(p.grad is not None and bool(p.grad.any()) for p in self._parameters()):
            if not self.model.training:
                raise RecordError(
                    "step() found gradients, but the model is in evaluation mode, where it is not "
                    "watched. Call model.train() before the pass that is trained on."
                )
            name = type(self).__name__
            raise RecordError(
                "step() found gradients but no forward pass that made them. Both the model and the "
                f"very criterion given to {name} must be called as modules, after the optimiser "
                "was made. What the criterion gets must be what the model returns, or those "
                f"numbers with other dimensions; for anything else give {name} the function that "
                "makes it, outputs=lambda returned: …. A criterion of several passes at once needs "
                "a model that makes them all."
            )

    def _check_parameters(self) -> None:
        """What the model trains must be what the groups hold: curvature is that of all of it."""
        self._group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        ours = self._group_of.keys()
        names = [
            n for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in ours
        ]
        if names:
            raise ValueError(
                f"the model trains parameters that the optimiser was not given: "
                f"{', '.join(names)}. Freeze them with requires_grad_(False), or give them to the "
                "optimiser too."
            )
        strangers = ours - {id(p) for p in self.model.parameters()}
        if strangers:
            raise ValueError(
                f"{len(strangers)} of the given parameters are not parameters of the model. The "
                "optimiser watches one model; give it that model's own parameters."
            )

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def _layer_state(self, name: str) -> dict[str, Any]:
        """Where a layer's factors are kept: with the first of its parameters."""
        return self.state[next(iter(self._observer.theta[name].parameters.values()))]

    def _setting(self, p: nn.Parameter, key: str) -> float:
        return float(self._group_of[id(p)][key])

    def _eta(self, name: str) -> float:
        first = next(iter(self._observer.theta[name].parameters.values()))
        return self._setting(first, "weight_decay")

    @property
    def diagnostics(self) -> dict[str, Any]:
        """The last step in plain numbers, ready for any logger.

        ``loss`` before the step, the ``predicted`` and, where it was looked at, the
        ``actual`` change and ρ; τ, γ, α, momentum, each layer's scale; what noise has left
        of steps (``boldness``); how many of them were refused and skipped; and the seconds of
        each phase. Where a step was skipped, or the one before it taken back instead, there are
        only the loss, damping and counters. Numbers are fetched only when this is read.
        """
        return {key: _plain(value) for key, value in self._diagnostics.items()} | {
            "seconds": self._watch.seconds()
        }

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Evaluate with the averaged parameters (appendix B.4); training goes on without.

        Example:
            >>> import torch, gaussnewton as gn
            >>> model, criterion = torch.nn.Linear(2, 1), torch.nn.MSELoss()
            >>> optimizer = gn.GaussNewton(model, criterion)
            >>> with optimizer.averaged(), torch.no_grad():
            ...     _ = model(torch.zeros(1, 2))
        """
        with torch.no_grad():
            kept = self._snapshot()
            self._restore([self.state[p].get("average", p) for p in self._parameters()])
        try:
            yield
        finally:
            with torch.no_grad():
                self._restore(kept)

    def averaged_parameters(self) -> dict[str, Tensor]:
        """Copies of the averaged parameters, by name, as ``load_state_dict`` takes them."""
        return {
            name: self.state[p].get("average", p).detach().clone()
            for name, p in self.model.named_parameters()
            if p in self.state
        }

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, and forget the forward passes that made them."""
        super().zero_grad(set_to_none)
        self._observer.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, e.g. of a layer that was frozen so far."""
        super().add_param_group(param_group)
        if hasattr(self, "_observer"):
            self._check_parameters()
            self._observer.attach()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a saved run stopped, bit for bit."""
        if "progress" not in state_dict["param_groups"][0]:
            raise ValueError(
                "this is the state of another kind of optimiser: it holds no progress of "
                f"{type(self).__name__}. Load a state that {type(self).__name__} has saved."
            )
        loaded = state_dict

        def note(_: Optimizer, now: dict[str, Any]) -> None:
            nonlocal loaded
            loaded = now

        last_hook = self.register_load_state_dict_pre_hook(note)  # others may exchange the dict
        try:
            super().load_state_dict(state_dict)
        finally:
            last_hook.remove()
        # torch casts all state to the dtype of its parameter; factors are wider than that.
        saved_ids = [i for group in loaded["param_groups"] for i in group["params"]]
        for i, p in zip(saved_ids, self._parameters(), strict=True):
            for key, value in loaded["state"].get(i, {}).items():
                if isinstance(value, Tensor):
                    self.state[p][key] = value.to(p.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {"_settings": self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_settings" in state:  # a copy, not load_state_dict
            self._begin()


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value
