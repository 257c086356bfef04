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
    precision = torch.finfo(like.dtype)
    tolerance = precision.eps * (8 if precision.bits < 32 else 1000)
    close = (got - expected).abs() <= tolerance * diagonal.abs().max()
    return diagonal if bool(close.all()) else None


def keeps_data_apart(product: LinearMap, like: Tensor) -> bool:
    """Whether a random half of the rows of ``A v`` ignores the other half of the rows of v."""
    if like.shape[0] < 2:
        return True
    half = _random_like(like.flatten(1)[:, 0]) < 1
    half[0], half[-1] = True, False  # so that neither half is empty
    v = _random_like(like)
    v[half] = 0
    got = product(v)
    return got.shape[0] == like.shape[0] and not bool(got[half].any())


def datum_matrices(product: LinearMap, like: Tensor) -> Tensor:
    """The d × d matrix of each datum of a linear map that keeps the data apart.

    The data do not interact, so the k-th unit vector at all data at once gives the k-th
    column of every matrix: d products in all, whatever the number of data.
    """
    n, d = like.flatten(1).shape
    eye = torch.eye(d, dtype=like.dtype, device=like.device)
    columns = [product(e.expand(n, d).reshape(like.shape)).flatten(1) for e in eye]
    return torch.stack(columns, dim=2)


def _random_like(like: Tensor) -> Tensor:
    # Its own generator: asking must not move the user's random state.
    generator = torch.Generator(device=like.device).manual_seed(7)
    v = torch.rand(like.shape, generator=generator, dtype=torch.float32, device=like.device)
    return (v + 0.5).to(like.dtype)
