"""What a linear map is, asked of the map itself: diagonal? does it keep the data apart?

A rule that lists which functions are elementwise is never complete, and a wrong entry is
a silent error. A linear map A given by its products can be asked instead: it is diagonal
if and only if A v = (A 1) ⊙ v for every v, and one random v decides it, but for a set of
maps of measure zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gaussnewton.errors import UnsupportedGraphError

LinearMap = Callable[[Tensor], Tensor]


def diagonal_of(product: LinearMap, like: Tensor) -> Tensor | None:
    """The diagonal of a linear map, or None where the map has more than that.

    Args:
        product: v ↦ A v, on tensors shaped like ``like``; the result may have another
            shape with as many entries in the same order.
        like: gives shape, dtype and device.

    Example:
        >>> import torch
        >>> from gaussnewton.probe import diagonal_of
        >>> diagonal_of(lambda v: 2 * v, torch.zeros(3))
        tensor([2., 2., 2.])
        >>> diagonal_of(lambda v: v.flip(0), torch.zeros(3)) is None
        True
    """
    diagonal = product(torch.ones_like(like))
    if diagonal.numel() != like.numel():
        return None
    v = _random_like(like)
    got, expected = product(v), diagonal * v.reshape(diagonal.shape)
    return diagonal if _close(got, expected) else None


def keeps_data_apart(product: LinearMap, like: Tensor) -> bool:
    """Whether row n of ``A v`` depends on row n of v alone.

    Rows of zeros must stay rows of zeros, exactly, whatever the others hold. Splitting the
    rows by each binary digit of their number sets every two rows apart at least once.
    """
    v, n = _random_like(like), like.shape[0]
    number = torch.arange(n, device=like.device)
    for digit in range((n - 1).bit_length()):
        ones = (number >> digit) % 2 == 1
        for kept in (ones, ~ones):
            got = product(v * kept.view(n, *[1] * (like.ndim - 1)))
            if got.shape[0] != n or bool(got[~kept].any()):
                return False
    return True


def datum_matrices(product: LinearMap, like: Tensor) -> Tensor:
    """The d × d matrix of each datum of a linear map that keeps the data apart.

    The data do not interact, so the k-th unit vector at all data at once gives the k-th
    column of every matrix: d products in all, whatever the number of data.
    """
    n, d = like.flatten(1).shape
    eye = torch.eye(d, dtype=like.dtype, device=like.device)
    columns = [product(e.expand(n, d).reshape(like.shape)).flatten(1) for e in eye]
    return torch.stack(columns, dim=2)


def refuse_single_differentiation(first: Tensor) -> None:
    """Raise where a first derivative cannot be differentiated again.

    A custom function marked ``once_differentiable`` cuts the graph of its derivative, and
    autograd would take what lies behind the cut as zero.
    """
    seen, frontier = set(), [first.grad_fn]
    while frontier:
        node = frontier.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "Error" in node.name():
            raise UnsupportedGraphError(
                "a custom autograd function between the layers is once_differentiable: its second "
                "derivative, which the Hessian needs, is not defined. Use 'kflr' or 'kfra'."
            )
        frontier.extend(next_node for next_node, _ in node.next_functions)


def _close(got: Tensor, expected: Tensor) -> bool:
    # Each row by its own scale: one large datum must not hide what the others do.
    precision = torch.finfo(got.dtype)
    tolerance = precision.eps * (8 if precision.bits < 32 else 1000)
    error, scale = (t.abs().reshape(t.shape[0], -1).amax(1) for t in (got - expected, expected))
    return bool((error <= tolerance * scale).all())


def _random_like(like: Tensor) -> Tensor:
    # Its own generator: asking must not move the user's random state.
    generator = torch.Generator(device=like.device).manual_seed(7)
    v = torch.rand(like.shape, generator=generator, dtype=torch.float32, device=like.device)
    return (v + 0.5).to(like.dtype)
