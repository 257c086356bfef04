"""The recursion itself: from the outputs back to the first trained layers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from gaussnewton.errors import UnsupportedGraphError
from gaussnewton.estimators.expected.choosing import step_of
from gaussnewton.estimators.expected.elementwise import ElementwiseStep
from gaussnewton.estimators.expected.frontier import Frontier
from gaussnewton.estimators.expected.graph import WIDEST, Graph
from gaussnewton.estimators.expected.homogeneous import from_sums, sum_all, sum_same
from gaussnewton.estimators.expected.layout import Layout
from gaussnewton.estimators.expected.region import Place
from gaussnewton.network import Network
from gaussnewton.tape import LayerCall


@dataclass(frozen=True)
class Expected:
    """The expected Gauss-Newton matrix at the outputs of one call of a layer.

    Attributes:
        parts: what each position has of its own, and what all have in common.
        layout: what channels and positions are.
        behind: where the output is used by an elementwise function alone, the same matrix at the
            result of that function, and its slope at each datum.
    """

    parts: Float[Tensor, "2 c c"]
    layout: Layout
    behind: tuple[Float[Tensor, "2 c c"], Float[Tensor, "n p c"]] | None = None

    def summed(self, wanted: Layout) -> tuple[Float[Tensor, "c c"], Float[Tensor, "c c"]]:
        """The matrices of all positions, summed; and those between all positions, too.

        Args:
            wanted: a layout of the same tensor with as many positions, or more if there is one.
        """
        P = self.layout.positions
        if wanted.positions == P:
            return sum_same(self.parts, P), sum_all(self.parts, (P, P))
        return wanted.summed(self.parts[0]), wanted.summed_pairs(self.parts[0])


def expected_matrices(network: Network, whole: int = 0) -> list[tuple[LayerCall, Expected]]:
    """M[y, y] at the outputs y of each call of a trained layer.

    Args:
        network: the recorded pass, whose graph has not been freed.
        whole: tensors with positions are kept whole up to so many entries of a datum.
    """
    record = network.record
    size = record.outputs[0].numel()
    if size > WIDEST:
        raise UnsupportedGraphError(
            f"KFRA starts from a matrix over the {size} outputs of a datum, more than {WIDEST}. "
            "Use 'kflr' or 'kfac'."
        )
    graph = Graph(network, whole)
    frontier = Frontier(graph.layouts)
    if graph.outputs in graph.layouts:
        start = record.geometry.hessian(*record.wide).widened().total()
        layout = graph.layouts[graph.outputs]
        sums = layout.summed(start), layout.summed_pairs(start)
        P = layout.positions
        frontier.add(graph.outputs, graph.outputs, from_sums(*sums, (P, P)))
    trained = {id(call) for calls in network.calls.values() for call in calls}
    result = []
    behind: dict[Place, tuple[Tensor, Tensor]] = {}
    for place in graph.order:
        if place not in frontier:  # inside of a larger function
            continue
        call, M = graph.calls.get(place), frontier[place]
        if call is not None and id(call) in trained:
            result.append((call, Expected(M, graph.layouts[place], behind.get(place))))
        if not any(p in graph.needed for p in graph.sources(place)):
            frontier.pop(place)
            continue
        step = step_of(graph, place)
        if isinstance(step, ElementwiseStep) and step.region is not None:
            for x, slope in zip(step.inputs, step.slopes, strict=True):
                if graph.only_used_in(x, step.region):
                    behind[x] = (M, slope)
        frontier.replace(place, step)
    return result
