"""What each layer and the criterion saw in a forward pass.

Hooks note every call of a layer that has trainable parameters: the value of its input,
and where input and output lie in the autograd graph. Places in the graph, not tensors,
because an in-place activation overwrites the output tensor right after.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from gaussnewton.compiled import eagerly
from gaussnewton.errors import BatchError, RecordError
from gaussnewton.hooks import Hook
from gaussnewton.layers.rule import LayerRule, MatrixRule, rule_for
from gaussnewton.losses import Geometry, geometry_of
from gaussnewton.parameters import Group, Theta
from gaussnewton.precision import single
from gaussnewton.uses import BareRule, ParameterUses, Use


@dataclass(frozen=True)
class LayerCall:
    """One call of one layer, or another use of a group of parameters.

    Attributes:
        name: of the group of parameters; of a layer without trainable ones, its own.
        module: the layer, or what stands for one.
        rule: what it means to curvature.
        input: what it was called on.
        input_edge: where that lies in the graph.
        output_edge: where the output lies in the graph.
        shape: of the output.
        version: how often the input had been changed in place.
        part: which of several matrices, one below the other, if the group is that.
    """

    name: str
    module: Any
    rule: LayerRule
    input: Tensor
    input_edge: GradientEdge | None
    output_edge: GradientEdge
    shape: torch.Size
    version: int
    part: int | None = None

    @property
    def width(self) -> int:
        """How many outputs there are of each datum."""
        return self.shape[1:].numel()

    def unspoiled_input(self) -> Tensor:
        """The input, if nobody has overwritten it since."""
        if self.input._version != self.version:
            raise RecordError(
                f"the input of layer '{self.name}' was changed in place after the layer read it, "
                "so its second moment is lost. Use the out-of-place operation there."
            )
        return self.input


@dataclass(frozen=True)
class Record:
    """One forward pass and the criterion's call at its end."""

    theta: Theta
    calls: list[LayerCall]
    geometry: Geometry
    outputs: Tensor
    targets: Any
    arguments: tuple[Any, ...]
    loss: Tensor

    @property
    def data(self) -> int:
        """How many data the batch has."""
        return self.outputs.shape[0]

    @property
    def wide(self) -> tuple[Tensor, Any]:
        """Outputs without their graph, and targets, in one dtype of float32 or wider."""
        outputs = single(self.outputs.detach())
        return outputs, _cast(self.targets, outputs.dtype)


def _cast(part: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors, perhaps within tuples, in another dtype."""
    if isinstance(part, tuple):
        return tuple(_cast(p, dtype) for p in part)
    is_float = isinstance(part, Tensor) and part.is_floating_point()
    return part.to(dtype) if is_float else part


class Tape:
    """Records the calls of a model's layers and of its criterion.

    Used as a context; what was recorded is in :attr:`record` afterwards. The model and the
    criterion are left without hooks, however the context is left.

    Example:
        >>> import torch, gaussnewton as gn
        >>> model, criterion = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()
        >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
        >>> with gn.Tape(model, criterion) as tape:
        ...     loss = criterion(model(x), y)
        >>> blocks = gn.KFLR()(tape.record)
        >>> blocks[""].Q.shape, blocks[""].G.shape
        (torch.Size([4, 4]), torch.Size([2, 2]))
    """

    def __init__(self, model: nn.Module, criterion: nn.Module | None) -> None:
        self.model, self.criterion = model, criterion
        self._geometry = None if criterion is None else geometry_of(criterion)
        self.theta = Theta(model)
        self._layers = recorded_layers(model, self.theta)
        self._handles: list[RemovableHandle] = []
        self._calls: list[LayerCall] = []
        self._record: Record | None = None

    @property
    def geometry(self) -> Geometry:
        """Of the criterion."""
        assert self._geometry is not None  # else no call of it can have been seen
        return self._geometry

    @property
    def record(self) -> Record:
        """The last forward pass that ended in a call of the criterion."""
        if self._record is None:
            raise RecordError(
                f"the tape holds no call of {type(self.criterion).__name__}: the criterion was "
                "called outside the record, or under no_grad, or not at all. Call both the model "
                "and this very criterion object inside `with gn.Tape(model, criterion):`."
            )
        return self._record

    def __enter__(self) -> Tape:
        self._eagerly = eagerly(self.model)
        self._eagerly.__enter__()
        self._hook_layers(traced=True)
        self._hook_criterion(traced=True)
        self._watch_uses()
        return self

    def __exit__(self, *_: object) -> None:
        self._uses.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._remove_hooks()
        self._eagerly.__exit__(None, None, None)

    def _hook_layers(self, traced: bool) -> None:
        for layer in self._layers:
            # First in line, so that what other hooks do to the output lies behind the layer.
            hook = Hook(self, layer.module, "_after_layer", layer, traced=traced)
            self._handles.append(
                layer.module.register_forward_hook(hook, with_kwargs=True, prepend=True)
            )

    def _watch_uses(self) -> None:
        """See parameters that are used outside of the calls of layers."""
        self._uses = ParameterUses(self.theta, self._note_use)
        for module in dict.fromkeys(layer.module for layer in self._layers):
            begin = Hook(self, module, "_begin_layer")
            end = Hook(self, module, "_end_layer")
            self._handles.append(module.register_forward_pre_hook(begin))
            self._handles.append(module.register_forward_hook(end, prepend=True))
        self._uses.__enter__()  # type: ignore[no-untyped-call]

    def _begin_layer(self, *_: Any) -> None:
        self._uses.depth += 1

    def _end_layer(self, *_: Any) -> None:
        self._uses.depth -= 1

    def _hook_criterion(self, traced: bool) -> None:
        criterion = self.criterion
        assert criterion is not None
        before = Hook(self, criterion, "_before_criterion", traced=traced)
        after = Hook(self, criterion, "_after_criterion", traced=traced)
        self._handles.append(criterion.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(criterion.register_forward_hook(after, with_kwargs=True))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def listening(self) -> bool:
        """Whether calls are to be recorded now."""
        return torch.is_grad_enabled()

    def keep(self, record: Record) -> None:
        """Take a record that has just been completed."""
        self._record = record

    def _after_layer(
        self,
        layer: Layer,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        if not (self.listening() and isinstance(output, Tensor) and output.requires_grad):
            return
        if layer.rule.accepts(module, args, kwargs):
            input = args[0] if args else kwargs["input"]
            self._note_use(Use(layer.name, layer.seen, layer.rule, input, output))

    def _note_use(self, use: Use) -> None:
        if not (self.listening() and use.output.requires_grad):
            return
        input, bare = use.input, isinstance(use.rule, BareRule)
        self._calls.append(
            LayerCall(
                name=use.group,
                module=use.module,
                rule=use.rule,
                input=input.detach(),
                # A bare parameter is no input: what made it is the parameter itself.
                input_edge=get_gradient_edge(input) if input.requires_grad and not bare else None,
                output_edge=get_gradient_edge(use.output),
                shape=use.output.shape,
                version=input._version,
                part=use.part,
            )
        )

    def _before_criterion(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        arguments = self._arguments(args, kwargs)
        if self.listening() and self._concerns(arguments):
            self.geometry.check(*self.geometry.bind(*arguments))

    def _after_criterion(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Tensor
    ) -> None:
        arguments = self._arguments(args, kwargs)
        if not (self.listening() and self._concerns(arguments)):
            return None
        outputs, targets = self.geometry.bind(*arguments)
        calls = self._calls_behind(arguments)
        if not outputs.requires_grad or calls is None:
            return self._unrelated()
        _refuse_one_datum(arguments, calls)
        self.keep(Record(self.theta, calls, self.geometry, outputs, targets, arguments, loss))
        return None

    def _concerns(self, arguments: tuple[Any, ...]) -> bool:  # noqa: ARG002
        """Whether a call of the criterion may be one to record."""
        return True

    def _calls_behind(self, arguments: tuple[Any, ...]) -> list[LayerCall] | None:  # noqa: ARG002
        """The layers' calls that lead to what the criterion is called with."""
        calls, self._calls = self._calls, []
        return calls or None

    def _unrelated(self) -> None:
        """The criterion was called on something else than the model's outputs."""
        raise RecordError(
            f"{type(self.criterion).__name__} was called on outputs that do not come from the "
            f"recorded {type(self.model).__name__}: they are detached, or were computed outside "
            "the record. Call the model inside `with gn.Tape(model, criterion):`."
        )

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What the criterion was called with, in order."""
        if not kwargs:
            return args
        assert self.criterion is not None
        return inspect.signature(self.criterion.forward).bind_partial(*args, **kwargs).args


def _refuse_one_datum(arguments: tuple[Any, ...], calls: list[LayerCall]) -> None:
    """Raise where a datum was given by itself: its outputs would be taken for those of many."""
    alone = any(isinstance(call.rule, MatrixRule) and call.input.ndim == 1 for call in calls)
    if arguments[0].ndim == 1 and alone:
        raise BatchError(
            f"outputs have shape {tuple(arguments[0].shape)}, and the model was called on one "
            "datum; curvature needs a batch dimension: x.unsqueeze(0)."
        )


@dataclass(frozen=True)
class Layer:
    """A layer whose calls are recorded.

    Attributes:
        name: the group of parameters that its calls use; its own name if it trains none.
        module: the layer.
        seen: the same, with the parameters of other groups taken for frozen ones.
        rule: what it means to curvature.
    """

    name: str
    module: nn.Module
    seen: nn.Module
    rule: LayerRule


def recorded_layers(model: nn.Module, theta: Theta) -> list[Layer]:
    """The modules to record: all that have a rule, once for each group whose parameters they use.

    Tied weights belong to the first layer that has them, so the calls of the others count for
    that one's group.
    """
    owner = {id(p): group for group in theta for p in group.parameters.values()}
    layers = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        parts = {owner[id(p)].name: key for key, p in reversed(own.items()) if id(p) in owner}
        for group, part in parts.items() or [(name, "")]:
            rule = rule_for(module, part)
            if rule is not None:
                seen = _seen(module, theta[group]) if parts else module
                layers.append(Layer(group, module, seen, rule))
    return layers


def _seen(module: nn.Module, group: Group) -> nn.Module:
    mine = {id(p) for p in group.parameters.values()}
    own = module._parameters
    if all(p is None or id(p) in mine or not p.requires_grad for p in own.values()):
        return module
    seen = copy.copy(module)
    seen.__dict__["_parameters"] = {
        key: p if p is None or id(p) in mine else nn.Parameter(p.detach(), requires_grad=False)
        for key, p in own.items()
    }
    return seen
