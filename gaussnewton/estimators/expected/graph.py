"""The tensors of a recorded pass in the order of execution, and the layout of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge

from gaussnewton.errors import UnsupportedGraphError
from gaussnewton.estimators.expected.layout import Layout, through_view
from gaussnewton.estimators.expected.region import Place, Region, shape_of
from gaussnewton.layers.normalisation import BY_CHANNEL, BY_ENTRY
from gaussnewton.network import Network
from gaussnewton.tape import LayerCall

WIDEST = 2**14
"""No matrix is wider than this; at float32 it takes one gibibyte."""

VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze", "Alias", "Clone")
    for number in range(3)
)
_PRODUCTS = ("Bmm", "Mm", "Addmm", "Baddbmm", "Mv", "Linear")


class Graph:
    """The tensors of a pass that lead to trained layers.

    Args:
        network: the pass.
        whole: tensors with positions are kept whole up to so many entries of a datum.

    Attributes:
        order: all tensors whose layout is known, each before those it depends on.
        layouts: of them.
        calls: the layer that returned a tensor, where one did.
        users: the tensors that were computed from one.
    """

    def __init__(self, network: Network, whole: int) -> None:
        record = network.record
        self.data, self.small = record.data, whole
        edge = get_gradient_edge(record.outputs)
        self.outputs: Place = (edge.node, edge.output_nr)
        self.calls: dict[Place, LayerCall] = {
            (call.output_edge.node, call.output_edge.output_nr): call
            for call in record.calls
            if call.shape[0] == call.input.shape[0] == record.data
        }
        trained = {id(call) for calls in network.calls.values() for call in calls}
        places = list(self._forward())
        self.users: dict[Place, list[Place]] = {place: [] for place in places}
        for place in places:
            for source in self.sources(place):
                self.users[source].append(place)
        self.needed: set[Place] = set()
        self._layouts: dict[Place, Layout | None] = {}
        for place in places:
            call = self.calls.get(place)
            if (call and id(call) in trained) or any(p in self.needed for p in self.sources(place)):
                self.needed.add(place)
            self._layouts[place] = self._layout(place)
            if call is not None:
                self._demand(call)
        if self._layouts[self.outputs] is None:
            self._layouts[self.outputs] = Layout.whole(record.outputs.shape[1:])
        self.order = [p for p in reversed(places) if p in self.needed and self._layouts[p]]
        self.layouts = {p: layout for p in self.order if (layout := self._layouts[p])}
        self._check_widths()

    def sources(self, place: Place) -> list[Place]:
        """The tensors that one was directly computed from."""
        call = self.calls.get(place)
        if call is not None:
            edge = call.input_edge
            return [] if edge is None else [(edge.node, edge.output_nr)]
        found = [(node, number) for node, number in place[0].next_functions if node is not None]
        return list(dict.fromkeys(found))

    def region(self, place: Place) -> Region:
        """What lies between a tensor and those before it whose layouts are known.

        Of a layer, what lies inside of it.
        """
        inside = self.sources(place) if place in self.calls else None

        def ends(at: Place) -> bool:
            return at in self.layouts if inside is None else at in inside

        def leads(at: Place) -> bool:
            if inside is None:
                return at in self.needed
            return at[0] is not None and bool(at[0].next_functions)

        inputs: dict[Place, None] = {}
        finished: dict[Any, None] = {}
        stack: list[tuple[Any, bool]] = [(place[0], False)]
        while stack:
            node, done = stack.pop()
            if node in finished:
                continue
            if done:
                finished[node] = None
                continue
            stack.append((node, True))
            for following in node.next_functions:
                if ends(following):
                    inputs[following] = None
                elif leads(following):
                    stack.append((following[0], False))
        return Region(place, list(inputs), list(reversed(finished)))

    def only_used_in(self, place: Place, region: Region) -> bool:
        """Whether a tensor is an input of a region and of nothing else."""
        return all(user not in self.calls and user[0] in region.nodes for user in self.users[place])

    def before(self, place: Place) -> str:
        """The name of a layer that a tensor was computed from, for an error."""
        seen, stack = {place}, [place]
        while stack:
            current = stack.pop()
            if current in self.calls and current != place:
                return f"layer '{self.calls[current].name}'"
            new = [p for p in self.sources(current) if p not in seen]
            seen.update(new)
            stack.extend(new)
        return "the inputs"

    def _forward(self) -> Iterator[Place]:
        """All tensors behind the outputs, each after those it depends on."""
        done: set[Place] = set()
        stack = [(self.outputs, False)]
        while stack:
            place, entered = stack.pop()
            if place in done:
                continue
            if entered:
                done.add(place)
                yield place
            else:
                stack.append((place, True))
                stack.extend((p, False) for p in self.sources(place) if p not in done)

    def _layout(self, place: Place) -> Layout | None:
        shape = shape_of(place)
        if len(shape) < 1 or shape[0] != self.data:
            return None
        datum = tuple(shape[1:])
        if len(datum) < 2 or shape[1:].numel() <= self.small:
            return Layout.whole(datum)
        call = self.calls.get(place)
        channels = self._made_by(call, datum) if call else self._inherited(place, datum)
        return None if channels is None else Layout(datum, channels)

    def _made_by(self, call: LayerCall, datum: tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(call.module, (*BY_CHANNEL, *BY_ENTRY)):
            known = [self._layouts.get(p) for p in self.sources(_place(call))]
            if known and known[0] is not None and known[0].shape == datum:
                return known[0].channels
        return _wanted_by(call.module, len(datum))

    def _demand(self, call: LayerCall) -> None:
        """A layer tells what its input is where nothing else does."""
        for place in self.sources(_place(call)):
            if self._layouts.get(place) is None:
                shape = tuple(call.input.shape[1:])
                self._layouts[place] = Layout(shape, _wanted_by(call.module, len(shape)))

    def _inherited(self, place: Place, datum: tuple[int, ...]) -> tuple[int, ...] | None:
        """The channels of a tensor that no layer returned, from those of its inputs."""
        node, name = place[0], place[0].name()
        known = [layout for p in self.sources(place) if (layout := self._layouts.get(p))]
        known = [layout for layout in known if len(layout.shape) > 1]
        if name.startswith(_PRODUCTS) or not known:
            return None
        first = next((layout for layout in known if layout.shape == datum), known[0])
        rank = len(first.shape)
        if name.startswith(("Permute", "Transpose")):
            order = _order(node, rank + 1)
            if order is None:
                return None
            return tuple(i for i, axis in enumerate(order) if axis in first.channels)
        if name in VIEWS:
            return through_view(first, datum)
        if len(datum) == rank:
            return first.channels
        removed = _removed(node, name, rank)
        if removed is not None and len(datum) == rank - len(removed):
            kept = [axis for axis in range(rank) if axis not in removed]
            return tuple(i for i, axis in enumerate(kept) if axis in first.channels)
        return None

    def _check_widths(self) -> None:
        for place, layout in self.layouts.items():
            if layout.width > WIDEST:
                raise UnsupportedGraphError(
                    f"KFRA would need a matrix of {layout.width} × {layout.width} numbers at the "
                    f"result of {place[0].name()}, behind {self.before(place)}, more than "
                    f"{WIDEST}². Use 'kflr' or 'kfac', or pool before flattening."
                )


def _place(call: LayerCall) -> Place:
    return call.output_edge.node, call.output_edge.output_nr


def _wanted_by(module: nn.Module, rank: int) -> tuple[int, ...]:
    """What are channels to a layer: the first axis, or the last ones."""
    if isinstance(module, BY_ENTRY):
        return tuple(range(rank))[-len(module.normalized_shape) :]
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, *BY_CHANNEL)):
        return (0,)
    return (rank - 1,)


def _order(node: Any, rank: int) -> list[int] | None:
    """Which axes of a datum become the axes of the result, if the data stay first."""
    if node.name().startswith("Permute"):
        order = [_axis(axis, rank) for axis in node._saved_dims]
    else:
        order = list(range(rank))
        a, b = _axis(node._saved_dim0, rank), _axis(node._saved_dim1, rank)
        order[a], order[b] = order[b], order[a]
    return [axis - 1 for axis in order[1:]] if order[0] == 0 else None


def _removed(node: Any, name: str, rank: int) -> set[int] | None:
    """The axes of a datum that a selection or a mean takes away."""
    if not name.startswith(("Select", "Mean", "Sum", "Amax", "Unbind")):
        return None
    found = getattr(node, "_saved_dim", None)
    if found is None:
        return None
    axes = found if isinstance(found, (tuple, list)) else [found]
    return {_axis(axis, rank + 1) - 1 for axis in axes}


def _axis(axis: int, rank: int) -> int:
    """Autograd saves negative axes as large numbers without a sign."""
    axis = axis - 2**64 if axis >= 2**63 else axis
    return axis % rank
