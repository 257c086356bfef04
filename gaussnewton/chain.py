"""From a record to the chain of layers of eq. nn, by following the autograd graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gaussnewton.errors import NonFiniteError, UnsupportedGraphError
from gaussnewton.layers import ChainRule
from gaussnewton.segments import General, Identity, Path, Segment, segment_of
from gaussnewton.tape import LayerCall, Record

Call = TypeVar("Call")


@dataclass(frozen=True)
class Link:
    """A layer, and the function behind it up to the next layer or the outputs."""

    call: LayerCall
    segment: Segment

    @property
    def rule(self) -> ChainRule:
        """How matrices go back through the layer."""
        assert isinstance(self.call.rule, ChainRule)
        return self.call.rule

    @property
    def trained(self) -> bool:
        """Whether the layer has a block of its own."""
        return any(p.requires_grad for p in self.call.module.parameters(recurse=False))


class Chain:
    """A feedforward network, from its outputs back to its first trained layer.

    Iterating yields one :class:`Link` a layer, the last layer first, as the recursions of
    the paper run.
    """

    def __init__(self, record: Record) -> None:
        check_criterion(record)
        self.record = record
        self.links = list(_follow(record))
        self._check_coverage()

    def __iter__(self) -> Iterator[Link]:
        return iter(self.links)

    @property
    def needs_graph(self) -> bool:
        """Whether some segment goes through autograd's graph and not through its own numbers."""
        return any(isinstance(link.segment, General) for link in self.links)

    @property
    def data(self) -> int:
        """How many data the batch has."""
        return self.record.data

    @property
    def trained(self) -> list[str]:
        """The names of the trained layers, in the order of the forward pass."""
        return [link.call.name for link in reversed(self.links) if link.trained]

    def _check_coverage(self) -> None:
        names = [link.call.name for link in self.links]
        for name in dict.fromkeys(names):
            if names.count(name) > 1:
                raise UnsupportedGraphError(
                    f"layer '{name}' is called {names.count(name)} times in one forward pass, or "
                    "another layer shares its weights."
                )
        for name in self._groups:
            if name not in names:
                raise UnsupportedGraphError(
                    f"layer '{name}' has trainable parameters but its output does not reach the "
                    "criterion in this forward pass: it was not called as a module, or what it "
                    "computed was detached or not used. Freeze it or take it out."
                )

    @property
    def _groups(self) -> dict[str, Any]:
        return self.record.theta.groups


def _follow(record: Record) -> Iterator[Link]:
    """Walk from the outputs to the first trained layer, one layer at a time."""
    refuse_tied(record)
    # A frozen layer that is no part of a chain is part of what lies between others.
    by_node = {call.output_edge.node: call for call in record.calls if _may_be_linked(call, record)}
    remaining = set(record.theta.groups)
    end: GradientEdge | None = get_gradient_edge(record.outputs)
    like, place = record.outputs.detach(), "the outputs"
    while end is not None and remaining:
        nodes, sources = _trace(end, by_node)
        refuse_bare_parameters(nodes, record, place)
        if not sources:
            return
        if len(sources) > 1:
            names = " and ".join(f"'{call.name}'" for call in sources)
            raise UnsupportedGraphError(
                f"layers {names} meet before {place}: this is not a chain of layers."
            )
        call = sources[0]
        if call.input.shape[0] != record.data:
            raise UnsupportedGraphError(
                f"layer '{call.name}' was called on {call.input.shape[0]} rows but the outputs "
                f"have {record.data}: its weights are shared between rows of one datum, or the "
                "batch was cut."
            )
        between = f"layer '{call.name}' and {place}"
        path = Path(end, call.output_edge, like, nodes)
        yield Link(call, segment_of(path, between) if nodes else Identity())
        remaining.discard(call.name)
        end, like, place = call.input_edge, call.input, f"layer '{call.name}'"
    _refuse_earlier_uses(end, by_node, record, place)


def _refuse_earlier_uses(
    end: GradientEdge | None, by_node: Mapping[Any, LayerCall], record: Record, place: str
) -> None:
    """Raise where what lies before the first trained layer uses its or another one's parameters.

    All of them have been met by then, so it would be for the second time.
    """
    frontier = [end] if end is not None else []
    while frontier:
        nodes, sources = _trace(frontier.pop(), by_node)
        refuse_bare_parameters(nodes, record, place)
        for call in sources:
            if call.name in record.theta.groups:
                raise UnsupportedGraphError(
                    f"layer '{call.name}' is called more than once in one forward pass, or another "
                    "layer shares its weights."
                )
            frontier += [call.input_edge] if call.input_edge is not None else []


def refuse_tied(record: Record) -> None:
    """Raise where one call uses parameters of several groups, some of them another layer's."""
    names: dict[Any, str] = {}
    for call in record.calls:
        other = names.setdefault(call.output_edge.node, call.name)
        if other != call.name:
            raise UnsupportedGraphError(
                f"layers '{call.name}' and '{other}' share a parameter: this is not a chain of "
                "layers with weights of their own."
            )


def _may_be_linked(call: LayerCall, record: Record) -> bool:
    kind = type(call.module).__name__
    objection = (
        call.rule.objection(call.input)
        if isinstance(call.rule, ChainRule)
        else f"is a {kind}, which is no layer of a chain"
    )
    if objection is not None and call.name in record.theta.groups:
        raise UnsupportedGraphError(f"layer '{call.name}' ({kind}) {objection}.")
    return objection is None


def _trace(end: GradientEdge, by_node: Mapping[Any, Call]) -> tuple[list[Any], list[Call]]:
    """The graph's nodes from a place back to the layers it depends on, and those layers."""
    nodes: dict[Any, None] = {}
    sources: dict[Any, Call] = {}
    frontier = [end.node]
    while frontier:
        node = frontier.pop()
        if node in by_node:
            sources[node] = by_node[node]
        elif node not in nodes:
            nodes[node] = None
            frontier.extend(next_node for next_node, _ in node.next_functions if next_node)
    return list(nodes), list(sources.values())


def refuse_bare_parameters(nodes: list[Any], record: Record, place: str) -> None:
    """Raise where a parameter is among the nodes: it is then used outside of its layer's call."""
    leaves = [v for node in nodes if (v := getattr(node, "variable", None)) is not None]
    if not leaves:
        return
    owners = {id(p): key for group in record.theta for key, p in group.parameters.items()}
    for variable in leaves:
        if id(variable) in owners:
            raise UnsupportedGraphError(
                f"parameter '{owners[id(variable)]}' is used before {place} without calling the "
                "layer that owns it. Curvature sees a layer's call only: call the module. A "
                "penalty on weights is the optimiser's weight_decay, and no part of a criterion."
            )


def check_criterion(record: Record) -> None:
    """Refuse a criterion that uses parameters of the model on its own."""
    if not record.loss.requires_grad:
        return
    stops = {call.output_edge.node for call in record.calls}
    stops.add(get_gradient_edge(record.outputs).node)
    nodes, _ = _trace(get_gradient_edge(record.loss), dict.fromkeys(stops))
    refuse_bare_parameters(nodes, record, "the loss")


def check_finite(record: Record) -> None:
    """Raise where a loss or output is not finite, and say where that began."""
    if bool(torch.isfinite(record.loss.detach()).all()) and _finite(record.outputs):
        return
    for call in record.calls:
        if not _finite(call.input):
            bad = int((~torch.isfinite(call.input)).sum())
            raise NonFiniteError(
                f"{bad} of {call.input.numel()} numbers that enter layer '{call.name}' are NaN or "
                "infinite. Check the data and the parameters before that layer."
            )
    where = "the outputs" if not _finite(record.outputs) else "the loss, but not the outputs"
    raise NonFiniteError(
        f"NaN or infinite numbers are in {where}. Check the last layer's parameters and the "
        "targets."
    )


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
