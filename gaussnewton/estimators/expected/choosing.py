"""Which step an operation of the graph takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from gaussnewton.errors import UnsupportedGraphError
from gaussnewton.estimators.expected.convolution import ConvolutionStep
from gaussnewton.estimators.expected.elementwise import ElementwiseStep
from gaussnewton.estimators.expected.frontier import Step
from gaussnewton.estimators.expected.general import GeneralStep
from gaussnewton.estimators.expected.graph import VIEWS, Graph
from gaussnewton.estimators.expected.layers import (
    EntryNormStep,
    FieldNormStep,
    MatrixStep,
    fixed_slope,
    normalises_channels,
)
from gaussnewton.estimators.expected.layout import Layout
from gaussnewton.estimators.expected.moving import MovingStep
from gaussnewton.estimators.expected.region import Place, Region, like, shape_of
from gaussnewton.layers import ConvolutionRule, LinearRule
from gaussnewton.layers.normalisation import BY_CHANNEL
from gaussnewton.precision import widened
from gaussnewton.probe import diagonal_of, keeps_data_apart
from gaussnewton.tape import LayerCall

MOST_POSITIONS = 64
"""Where positions must go back one by one, so many of them speak for all."""

_MOVING = (
    *("Permute", "Transpose", "T", "Slice", "Select", "Narrow", "Split", "SplitWithSizes"),
    *("UnsafeSplit", "Unbind", "Cat", "Stack", "ConstantPadNd", "Flip", "Roll", "PixelShuffle"),
    "PixelUnshuffle",
)
MOVES = VIEWS | frozenset(f"{name}Backward{k}" for name in _MOVING for k in range(3))
"""Nodes that move entries and change none."""

_CONSTANT = (
    *("Mean", "Sum", "AvgPool2D", "AvgPool3D", "AdaptiveAvgPool2D", "AdaptiveAvgPool3D"),
    *("UpsampleNearest1D", "UpsampleNearest2D", "UpsampleNearest3D", "UpsampleBilinear2D"),
    *("Expand", "Repeat", "Add", "Sub"),
)
CONSTANT = frozenset(f"{name}Backward{k}" for name in _CONSTANT for k in range(3))
"""Nodes that are linear, and the same for all data."""


def step_of(graph: Graph, place: Place) -> Step:
    """The step that replaces a tensor by those it was computed from."""
    call = graph.calls.get(place)
    if call is not None:
        found = _layer_step(graph, place, call)
        if found is not None:
            return found
    region = graph.region(place)
    layout, layouts = graph.layouts[place], [graph.layouts[p] for p in region.inputs]
    names = region.names
    if set(names) <= MOVES and len(names) == 1 and not region.repeats:
        return MovingStep(region, layout, layouts)
    try:
        slopes = _slopes(region, layout, layouts)
        if slopes is not None:
            region, slopes = _grown(graph, region, slopes)
            return ElementwiseStep(region.inputs, slopes, region)
        _check_data(graph, place, region)
        constant = set(names) <= CONSTANT or isinstance(
            call.rule if call else None, (LinearRule, ConvolutionRule)
        )
        combs = _combs(region, layout, layouts)
        pools = len(names) == 1 and "Pool" in names[0]
    except (RuntimeError, TypeError, NotImplementedError) as error:
        if isinstance(error, UnsupportedGraphError):
            raise
        raise UnsupportedGraphError(
            f"KFRA cannot go back through {', '.join(dict.fromkeys(names))}, behind "
            f"{graph.before(place)} ({error}). Use 'kflr' or 'kfac'."
        ) from error
    return GeneralStep(region, layout, layouts, combs, pools, constant)


def _layer_step(graph: Graph, place: Place, call: LayerCall) -> Step | None:
    """A layer's own rule, where its layouts allow it."""
    (input,) = graph.sources(place)
    layout, own = graph.layouts[place], graph.layouts[input]
    module: Any = call.module
    if isinstance(call.rule, LinearRule):
        last = (len(own.shape) - 1,)
        return MatrixStep(input, module.weight) if own.channels == layout.channels == last else None
    if isinstance(call.rule, ConvolutionRule):
        if own.channels == layout.channels == (0,):
            return ConvolutionStep(input, module, layout, own)
        return None
    if normalises_channels(module, own):
        return EntryNormStep(input, module, call.unspoiled_input(), own)
    if isinstance(module, BY_CHANNEL) and own == layout:
        return _channel_norm_step(graph, place, module, call.unspoiled_input())
    return None


def _channel_norm_step(graph: Graph, place: Place, module: Any, values: Tensor) -> Step | None:
    (input,), own = graph.sources(place), graph.layouts[place]
    of_batch = isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
    stored = getattr(module, "running_var", None) is not None and not module.training
    if of_batch or stored:
        return ElementwiseStep((input,), [own.gather(fixed_slope(module, values))])
    if own.positions == 1:  # nothing is taken for alike: exactly, by rows
        return None
    return FieldNormStep(graph.region(place), own, [own], fixed_slope(module, values))


def _slopes(region: Region, layout: Layout, layouts: Sequence[Layout]) -> list[Tensor] | None:
    """The derivative by each input where the function is elementwise in all of them."""
    if any(own != layout for own in layouts):
        return None
    slopes = []
    with torch.no_grad():
        for i, own in enumerate(layouts):
            slope = diagonal_of(lambda v, i=i: region.pull(v)[i], like(region.output))  # type: ignore[misc]
            if slope is None:
                return None
            slopes.append(widened(own.gather(slope)))
    return slopes


def _grown(graph: Graph, region: Region, slopes: list[Tensor]) -> tuple[Region, list[Tensor]]:
    """More of the graph, as long as it stays elementwise: of x · σ(x) all is one function of x.

    What lies inside need not be taken for independent of anything.
    """
    layout = graph.layouts[region.output]
    refused: set[Place] = set()
    while True:
        candidates = [
            place
            for place in region.inputs
            if place not in graph.calls and place not in refused
            if graph.layouts[place] == layout and graph.only_used_in(place, region)
        ]
        if not candidates:
            return region, slopes
        inner = graph.region(candidates[0])
        inputs = [p for p in region.inputs if p != candidates[0]]
        larger = Region(
            region.output,
            list(dict.fromkeys([*inputs, *inner.inputs])),
            [*(node for node in region.nodes if node not in inner.nodes), *inner.nodes],
        )
        found = _slopes(larger, layout, [graph.layouts[p] for p in larger.inputs])
        if found is None:
            refused.add(candidates[0])
        else:
            region, slopes = larger, found


def _check_data(graph: Graph, place: Place, region: Region) -> None:
    for i in range(len(region.inputs)):
        with torch.no_grad():
            apart = keeps_data_apart(lambda v, i=i: region.pull(v)[i], like(region.output))  # type: ignore[misc]
        if not apart:
            raise UnsupportedGraphError(
                f"{', '.join(dict.fromkeys(region.names))} behind {graph.before(place)} mixes the "
                "data of a batch. The curvature of one datum, which KFRA needs, is not defined "
                "there: use 'kfac', or call model.eval() first."
            )


def _combs(region: Region, layout: Layout, layouts: Sequence[Layout]) -> list[Int[Tensor, " k"]]:
    """Sets of positions of y that do not meet in any input."""
    P = layout.positions
    everywhere = [torch.arange(P)]
    if P == 1 or _keeps_positions_apart(region, layout, layouts):
        return everywhere
    node = region.nodes[0]
    if len(region.nodes) == 1 and all(own.positions > 1 for own in layouts):
        if "Pool" in node.name():
            return _windows(node, layout, layouts[0])
        if set(region.names) <= MOVES:
            return everywhere
    if all(own.positions == 1 for own in layouts) or P <= MOST_POSITIONS:
        return [torch.tensor([p]) for p in range(P)]
    chosen = torch.linspace(0, P - 1, MOST_POSITIONS).round().long()
    return [p.reshape(1) for p in chosen]


def _keeps_positions_apart(region: Region, layout: Layout, layouts: Sequence[Layout]) -> bool:
    P = layout.positions
    if any(own.positions != P for own in layouts):
        return False
    generator = torch.Generator().manual_seed(P)
    kept = torch.rand(P, generator=generator) < 0.5
    kept[0], kept[1] = True, False
    n = shape_of(region.output)[0]
    v = torch.rand(P, layout.width, generator=generator).add(0.5) * kept.unsqueeze(1)
    v = v.to(like(region.output))
    with torch.no_grad():
        found = region.pull(layout.scatter(v).expand(n, *layout.shape))
    return not any(
        bool(own.gather(g.reshape(n, *own.shape))[:, ~kept].any())
        for own, g in zip(layouts, found, strict=True)
    )


def _windows(node: Any, layout: Layout, own: Layout) -> list[Int[Tensor, " k"]]:
    """Pooling: positions whose windows do not overlap."""
    sizes = layout.spatial
    kernel = list(getattr(node, "_saved_kernel_size", ()))
    if kernel:
        stride = list(node._saved_stride) or kernel
        dilation = list(getattr(node, "_saved_dilation", ())) or [1] * len(kernel)
        spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
        apart = [ceil(span / s) for span, s in zip(spans, stride, strict=True)]
    else:  # adaptive: windows overlap by one at most where the sizes do not divide
        apart = [1 if a % b == 0 else 2 for a, b in zip(own.spatial, sizes, strict=True)]
    apart = apart[-len(sizes) :] if len(apart) >= len(sizes) else [1, *apart]
    coordinates = torch.stack(
        torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    ).flatten(1)
    combs = []
    for remainder in product(*map(range, apart)):
        pairs = zip(coordinates, remainder, apart, strict=True)
        chosen = torch.stack([c % m == r for c, r, m in pairs]).all(0).nonzero().squeeze(1)
        if len(chosen):
            combs.append(chosen)
    return combs
