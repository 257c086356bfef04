"""Watching a user's own training loop: which forward passes made the gradient.

A :class:`~gaussnewton.Tape` records one forward pass on request. An observer is a tape that
stays attached, keeps what every pass in training mode saw until the optimiser steps, and can
evaluate those passes again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from gaussnewton.again import Again, ForwardMode, Outline, Repeat
from gaussnewton.chain import Chain
from gaussnewton.compiled import eagerly, is_compiled, original
from gaussnewton.errors import RecordError, UnsupportedGraphError
from gaussnewton.hooks import Hook
from gaussnewton.losses import geometry_of
from gaussnewton.losses.inside import InnerLoss, LossWatch
from gaussnewton.model_state import unchanged
from gaussnewton.network import WORKSPACE, Network
from gaussnewton.parameters import Theta
from gaussnewton.passage import Passage, passage_of
from gaussnewton.passes import ForwardPass, Source, Start, chosen, flat, precision_of
from gaussnewton.tape import LayerCall, Record, Tape, recorded_layers


@dataclass
class Observation:
    """One forward pass that ended in a call of the criterion.

    Attributes:
        record: what it saw.
        layers: its chain of layers, taken from the graph before ``backward`` frees it; None where
            that does not do, until somebody asks: the pass is then run once more.
        draws: whether random numbers were drawn in it.
        known: whether ``layers`` were there from the start, so that what needs them runs nothing.
        observer: who saw it, and can run it once more.
        start: how it began.
        sources: for each argument of the criterion, how it comes from what the model returns;
            None for those that do not.
        factor: ∂(what was differentiated) / ∂loss, e.g. 1/4 in the mean of four batches;
            None until a gradient has come back through the loss.
    """

    record: Record
    layers: Passage | None
    start: Start
    sources: tuple[Source | None, ...]
    draws: bool
    observer: weakref.ref[Observer]
    factor: Tensor | None = None
    known: bool = field(init=False)

    def __post_init__(self) -> None:
        self.known = self.layers is not None

    @property
    def passage(self) -> Passage:
        """The structure of its layers."""
        if self.layers is None:
            self.layers = self._watching.record_again(self)
        return self.layers

    @property
    def as_a_whole(self) -> Passage | Repeat:
        """What products with the Jacobian of all of its data need: its layers only in a chain."""
        known = self._watching.repeat(self) if self.layers is None else None
        return self.passage if known is None else known

    @property
    def _watching(self) -> Observer:
        observer = self.observer()
        assert observer is not None  # it is the observer's own optimiser that asks
        return observer

    @property
    def loss(self) -> Tensor:
        """The scalar, as it was."""
        return self.record.loss.detach().sum()


class Observer(Tape):
    """Keeps the observations since the last step.

    Silent in evaluation mode, under ``no_grad``, and in copies of the model.

    Args:
        model: the network.
        criterion: the loss module; None where the model calls a loss function by itself.
        outputs: from what the model returns to what the criterion is called with first, if that
            is not one of the tensors that the model returns.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module | None,
        outputs: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(model, criterion)
        self.outputs = outputs
        self._watch: LossWatch | None = None
        self.observations: list[Observation] = []
        self._passes: list[ForwardPass] = []
        self._current: ForwardPass | None = None
        self._paused = False
        self._forward_mode = ForwardMode()
        self.attach()
        weakref.finalize(self, _remove, self._handles)

    def attach(self) -> None:
        """Put the hooks in place, for the layers that are trained now."""
        self._remove_hooks()
        self.theta = Theta(original(self.model))
        self._layers = recorded_layers(original(self.model), self.theta)
        self._compiled = is_compiled(self.model)
        self._trained = self._trained_now()
        self._entries: int | None = None  # of a datum in the last network that was recorded
        if not self._compiled:
            self._hook_layers(traced=False)
        if self.criterion is not None:
            self._hook_criterion(traced=False)
        before = Hook(self, self.model, "_before_model", traced=False)
        after = Hook(self, self.model, "_after_model", traced=False)
        self._handles.append(
            self.model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        )
        self._handles.append(self.model.register_forward_hook(after))
        leave = Hook(self, self.model, "_leave_model", traced=False)
        self._handles.append(self.model.register_forward_hook(leave, always_call=True))

    def take(self) -> list[Observation]:
        """The passes that the present gradient came from; all are forgotten here."""
        taken, self.observations, self._passes, self._current = self.observations, [], [], None
        self._calls = []  # else they would hold what entered each layer until the next pass
        return taken

    def forget(self) -> None:
        """Drop the passes that a gradient has come from, as when the gradients are reset.

        The others stay: a loop may call the model, then ``zero_grad``, then ``backward``.
        """
        for observation in self.observations:
            observation.factor = None
        self.observations = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Passes inside are not observed."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def evaluate(self, observation: Observation) -> Tensor:
        """The loss of an observed pass at the parameters of now.

        Random numbers and buffers are those of the pass, so that the same function is
        evaluated; afterwards all is as it was.
        """
        geometry = observation.record.geometry
        with self._as_it_began(observation.start), torch.no_grad():
            arguments = self._arguments_again(observation, self.model)
            return geometry.value(*geometry.bind(*arguments))

    def record_again(self, observation: Observation) -> Passage:
        """The structure of a pass whose graph has been freed, or did not show its layers."""
        with self._as_it_began(observation.start), torch.enable_grad():
            criterion = observation.record.geometry.criterion
            with eagerly(self.model), Tape(original(self.model), criterion) as tape:
                criterion(*self._arguments_again(observation, self.model))
            passage = passage_of(tape.record, self._again(observation))
        if isinstance(passage, Network):
            self._entries = passage.entries
        return passage

    def repeat(self, observation: Observation) -> Repeat | None:
        """A pass of a network as a whole, of whose layers nothing is known; None before the first.

        Without them a part of the data cannot be told to be the same function by itself, so it is
        for products with all of the data, where these are not too many.
        """
        if self._entries is None:
            return None
        outline = Outline(self.theta, observation.record.data, self._entries, apart=False)
        few = outline.data * outline.bytes_of(1) <= WORKSPACE
        return Repeat(self._again(observation), outline) if few else None

    def _again(self, observation: Observation) -> Again:
        return Again(
            original(self.model),
            partial(self._outputs_again, observation),
            partial(self._eagerly_as_it_began, observation.start),
            _is_whole(observation),
            self._forward_mode,
        )

    def _outputs_again(
        self, observation: Observation, part: slice, model: Callable[..., Any]
    ) -> Tensor:
        """What the criterion looks at, of some of the data."""
        data = observation.record.data

        def cut(argument: Any) -> Any:
            mine = isinstance(argument, Tensor) and argument.ndim and len(argument) == data
            return argument[part] if mine else argument

        bind = observation.record.geometry.bind
        if _is_whole(observation):
            return bind(*self._arguments_again(observation, model))[0][part]
        return bind(*self._arguments_again(observation, model, cut))[0]

    @contextmanager
    def _as_it_began(self, start: Start) -> Iterator[None]:
        watched = [part for part in (self.model, self.criterion) if part is not None]
        with self.paused(), unchanged(*watched), start.autocast():
            torch.set_rng_state(start.random_state)
            with torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    if name in start.buffers:  # others were made in the pass itself
                        buffer.copy_(start.buffers[name])
            yield

    @contextmanager
    def _eagerly_as_it_began(self, start: Start) -> Iterator[None]:
        with eagerly(self.model), self._as_it_began(start):
            yield

    def _arguments_again(
        self,
        observation: Observation,
        model: Callable[..., Any],
        cut: Callable[[Any], Any] = lambda argument: argument,
    ) -> list[Any]:
        """What the criterion would be called with, were the pass run again now."""
        start = observation.start
        args, kwargs = tree_map(cut, (start.args, start.kwargs))
        if self.criterion is None:
            with LossWatch() as watch:
                model(*args, **kwargs)
            return list(watch.only(self.model).arguments)
        outputs = model(*args, **kwargs)
        return [
            cut(argument) if source is None else source(outputs)
            for argument, source in zip(
                observation.record.arguments, observation.sources, strict=True
            )
        ]

    def listening(self) -> bool:
        return super().listening() and self.model.training and not self._paused

    def _before_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trained = self._trained_now()
        if not self.listening() or not any(trained):  # as inside of torch.func's transformations
            return
        if is_compiled(self.model) != self._compiled or trained != self._trained:
            self.attach()
        if self.observations and not self._any_gradient():
            self.forget()  # they were reset without telling the optimiser
        for part in self._passes:
            part.held = []
        self._passes = [part for part in self._passes if part.alive]
        buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        precision = precision_of(next(self.model.parameters()).device.type)
        start = Start(args, kwargs, torch.get_rng_state(), buffers, precision)
        self._calls = []
        self._current = ForwardPass(start, self._calls)
        if self.criterion is None:
            self._watch = LossWatch()
            self._watch.__enter__()  # type: ignore[no-untyped-call]

    def _after_layer(self, *arguments: Any) -> None:
        if self._current is not None:  # else it is a layer called by itself
            super()._after_layer(*arguments)

    def _after_model(self, _: nn.Module, __: tuple[Any, ...], outputs: Any) -> None:
        if self._current is not None and self.listening():
            returned = flat(outputs)
            leaves = [leaf for leaf in returned if isinstance(leaf, Tensor)]
            self._current.outputs = [
                weakref.ref(leaf) if isinstance(leaf, Tensor) else None for leaf in returned
            ]
            self._current.versions = [getattr(leaf, "_version", 0) for leaf in returned]
            self._current.held = [leaf for leaf in leaves if leaf.requires_grad]
            if self.outputs is not None:
                self._current.nodes = {leaf.grad_fn for leaf in leaves} - {None}
            self._current.draws = not torch.equal(
                torch.get_rng_state(), self._current.start.random_state
            )
            self._passes.append(self._current)
            if self._watch is not None:
                self._keep_inner(self._watch.only(self.model), self._current)
        self._current = None

    def _leave_model(self, *_: Any) -> None:
        """Also where the model has raised an error."""
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _keep_inner(self, inner: InnerLoss, found: ForwardPass) -> None:
        """The record of a model that calls its loss by itself."""
        geometry = geometry_of(inner.criterion)
        outputs, targets = geometry.bind(*inner.arguments)
        geometry.check(outputs, targets)
        record = Record(
            self.theta, found.calls, geometry, outputs, targets, inner.arguments, inner.value
        )
        self._keep(record, found, tuple(None for _ in inner.arguments))

    def _trained_now(self) -> tuple[bool, ...]:
        return tuple(p.requires_grad for p in self.model.parameters())

    def _any_gradient(self) -> bool:
        gradients = (p.grad for group in self.theta for p in group.parameters.values())
        return any(grad is not None and bool(grad.any()) for grad in gradients)

    def _pass_behind(self, arguments: tuple[Any, ...]) -> ForwardPass | None:
        """The pass that returned what the criterion is called with first."""
        first = arguments[0] if arguments else None
        for part in self._passes:
            if part.source(first) is not None:
                return part
        if self.outputs is None:
            return None
        return next((part for part in self._passes if part.is_behind(first)), None)

    def _concerns(self, arguments: tuple[Any, ...]) -> bool:
        return self._pass_behind(arguments) is not None

    def _calls_behind(self, arguments: tuple[Any, ...]) -> list[LayerCall] | None:
        found = self._pass_behind(arguments)
        return None if found is None else found.calls

    def _unrelated(self) -> None:
        """Not our business: the criterion may serve other models too."""

    def keep(self, record: Record) -> None:
        found = self._pass_behind(record.arguments)
        assert found is not None
        self._keep(record, found, self._sources(record.arguments, found))
        found.let_go(record.arguments[0])

    def _sources(self, arguments: tuple[Any, ...], found: ForwardPass) -> tuple[Source | None, ...]:
        if self.outputs is None or found.source(arguments[0]) is not None:
            return tuple(found.source(argument) for argument in arguments)
        count = getattr(self.criterion, "outputs", 1)
        given: list[Source | None] = [partial(chosen, self.outputs, i) for i in range(count)]
        return (*given, *(None for _ in arguments[count:]))

    def _keep(self, record: Record, found: ForwardPass, sources: tuple[Source | None, ...]) -> None:
        layers = self._chain(record)
        # The observation is held by a hook of the loss, and so must not hold the loss: a loss that
        # is never differentiated goes away, and its observation with it.
        seen = replace(record, loss=record.loss.detach())
        if layers is not None:
            layers.record = seen
        observer = weakref.ref(self)
        observation = Observation(seen, layers, found.start, sources, found.draws, observer)

        def differentiated(gradient: Tensor) -> None:
            mine = observer()
            if mine is not None:
                mine._note(observation, gradient.detach())

        record.loss.register_hook(differentiated)

    def _chain(self, record: Record) -> Chain | None:
        """The chain, if there is one that needs no graph; backward will free that."""
        if self._compiled:
            return None
        try:
            chain = Chain(record)
        except UnsupportedGraphError:
            return None
        return None if chain.needs_graph else chain

    def _note(self, observation: Observation, gradient: Tensor) -> None:
        """A gradient has come back through the loss; if several do, they add up."""
        new = gradient.reshape(-1)[0]
        if not bool((gradient == new).all()):
            raise RecordError(
                "the criterion's losses were weighted one by one before they were added up, and "
                "the curvature of such a sum is not known. Give the weights to the criterion, or "
                "write the weighted loss as gn.Loss(fn)."
            )
        if observation.factor is None:
            self.observations.append(observation)
            observation.factor = new
        else:
            observation.factor = observation.factor + new


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _is_whole(observation: Observation) -> bool:
    """Whether some of its data cannot be evaluated without the others.

    Of a part of the data other random numbers would be drawn; and where a datum has several rows
    of outputs, some of these are not some of the data.
    """
    given = tree_leaves((observation.start.args, observation.start.kwargs))
    sizes = {len(leaf) for leaf in given if isinstance(leaf, Tensor) and leaf.ndim}
    return observation.draws or sizes != {observation.record.data}
