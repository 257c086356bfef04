"""Whether a graph is known to keep the data of a batch apart, without a pass through it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ELEMENTWISE = {
    "AddBackward0",
    "CeluBackward0",
    "CloneBackward0",
    "EluBackward0",
    "GeluBackward0",
    "HardswishBackward0",
    "HardtanhBackward0",
    "LeakyReluBackward0",
    "MulBackward0",
    "NegBackward0",
    "ReluBackward0",
    "SigmoidBackward0",
    "SiluBackward0",
    "SoftplusBackward0",
    "SubBackward0",
    "TanhBackward0",
    "ThresholdBackward0",
}
WITHIN_A_DATUM = {
    "AvgPool2DBackward0",
    "AvgPool3DBackward0",
    "MaxPool2DWithIndicesBackward0",
    "MaxPool3DWithIndicesBackward0",
    "MkldnnAdaptiveAvgPool2DBackward0",
    "AdaptiveAvgPool2DBackward0",
    "NativeLayerNormBackward0",
    "ReshapeAliasBackward0",
    "UnsafeViewBackward0",
    "ViewBackward0",
}
"""What does not touch the first dimension as long as its size is the same before and after."""


def keeps_apart(nodes: Iterable[Any], data: int) -> bool:
    """Whether all nodes are of kinds that leave each datum to itself; False where it is not known.

    Args:
        nodes: of an autograd graph.
        data: the size of the first dimension, which counts the data.

    Example:
        >>> import torch
        >>> from gaussnewton.apart import keeps_apart
        >>> x = torch.randn(3, 2, requires_grad=True)
        >>> keeps_apart([x.tanh().grad_fn], 3), keeps_apart([x.cumsum(0).grad_fn], 3)
        (True, False)
    """
    return all(_is_apart(node, data) for node in nodes)


def _is_apart(node: Any, data: int) -> bool:
    shapes = [_shape(node, 0), *(_shape(*following) for following in node.next_functions)]
    if any(shape is None for shape in shapes):
        return False
    known = [shape for shape in shapes if shape]  # none of what needs no gradient
    if any(shape[0] != data for shape in known):
        return False
    if node.name() in ELEMENTWISE:
        # Of another number of dimensions it would be broadcast, and its first is not the data's.
        return len({len(shape) for shape in known}) == 1
    return node.name() in WITHIN_A_DATUM


def _shape(node: Any, place: int) -> tuple[int, ...] | None:
    """The shape of what a node returned; () of no node, None where it is not to be had."""
    if node is None:
        return ()
    metadata = getattr(node, "_input_metadata", ())  # not public, so it may go
    return tuple(metadata[place].shape) or None if place < len(metadata) else None
