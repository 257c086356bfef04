"""Block-diagonal matrices of bounded blocks: what a factor becomes where it is too wide to invert.

A tiled matrix T of size d is stored as ``[d, b]``: row i holds its row within the tile that it
belongs to. Tiles begin at multiples of b and are b × b; the last one may be smaller, and then the
rest of its rows is zero. With b = d it is the matrix itself, and with b = 1 a diagonal, so nothing
below asks which of the three it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.gram import symmetric_product
from gaussnewton.precision import widened

VOCABULARY = 20_000
"""A factor that is wider than this is diagonal where there is a limit at all, as that of an
embedding is: a head with an output for each word has entries enough on its diagonal."""


def tile_size(d: int, largest: int | None) -> int:
    """How wide the tiles of a matrix of size d are, of at most so many: all alike but the last.

    Example:
        >>> from gaussnewton.tiles import tile_size
        >>> [tile_size(7, largest) for largest in (None, 7, 6, 3)], tile_size(50_000, 4096)
        ([7, 7, 4, 3], 1)
    """
    if largest is None or d <= largest:
        return d
    if d > VOCABULARY:
        return 1
    count = -(-d // largest)
    return -(-d // count)


def tiled(matrix: Float[Tensor, "d d"], largest: int | None) -> Float[Tensor, "d b"]:
    """The tiles on the diagonal of a matrix.

    Example:
        >>> import torch
        >>> from gaussnewton.tiles import tiled
        >>> tiled(torch.arange(9.0).reshape(3, 3), 2)
        tensor([[0., 1.],
                [3., 4.],
                [8., 0.]])
    """
    d = len(matrix)
    size = tile_size(d, largest)
    if size == d:
        return matrix
    if size == 1:
        return matrix.diagonal().unsqueeze(1).clone()
    result = matrix.new_zeros(d, size)
    for at in _places(d, size):
        result[at, : at.stop - at.start] = matrix[at, at]
    return result


def tiled_each(matrices: Float[Tensor, "g d d"], largest: int | None) -> Float[Tensor, "g d b"]:
    """The tiles of several matrices."""
    d = matrices.shape[1]
    if tile_size(d, largest) == d:
        return matrices
    return torch.stack([tiled(matrix, largest) for matrix in matrices])


def untiled(T: Float[Tensor, "d b"]) -> Float[Tensor, "d d"]:
    """The matrix written out, with its zeros."""
    d, size = T.shape
    if size == d:
        return T
    return torch.block_diag(*(T[at, : at.stop - at.start] for at in _places(d, size)))


def tiled_diagonal(values: Float[Tensor, " d"], largest: int | None) -> Float[Tensor, "d b"]:
    """A diagonal matrix, in tiles."""
    result = values.new_zeros(len(values), tile_size(len(values), largest))
    return result.scatter_(1, _columns(result), values.unsqueeze(1))


def tiled_gram(
    rows: Float[Tensor, "n d"], largest: int | None, scale: float = 1.0
) -> Float[Tensor, "d b"]:
    """The tiles of scale · XᵀX, in float32 or wider; no other part of it is computed.

    Example:
        >>> import torch
        >>> from gaussnewton.tiles import tiled, tiled_gram
        >>> x = torch.randn(9, 5, dtype=torch.float64)
        >>> torch.allclose(tiled_gram(x, 2), tiled(x.T @ x, 2))
        True
    """
    rows = widened(rows)
    return tiled_product(rows, rows, largest, scale)


def tiled_product(
    left: Float[Tensor, "n d"],
    right: Float[Tensor, "n d"],
    largest: int | None,
    scale: float = 1.0,
) -> Float[Tensor, "d b"]:
    """The tiles of scale · LᵀR, for L and R whose product is known to be symmetric."""
    d = left.shape[1]
    size = tile_size(d, largest)
    if size == d:
        return symmetric_product(left, right, scale)
    if size == 1:
        return (left * right).sum(0).mul_(scale).unsqueeze(1)
    result = left.new_zeros(d, size)
    for at in _places(d, size):
        part = result[at, : at.stop - at.start]
        symmetric_product(left[:, at], right[:, at], scale, out=part)
    return result


def times(T: Float[Tensor, "d b"], V: Float[Tensor, "d m"]) -> Float[Tensor, "d m"]:
    """T V."""
    d, size = T.shape
    if size == d:
        return T @ V
    return T * V if size == 1 else with_tiles(torch.matmul, T, V)


def with_tiles(
    function: Callable[[Tensor, Tensor], Tensor], T: Float[Tensor, "d b"], V: Float[Tensor, "d m"]
) -> Float[Tensor, "d m"]:
    """A function of each tile and its rows of V, for all tiles of one size at once."""
    found = [
        function(tiles, V[at].unflatten(0, (len(tiles), -1))).flatten(0, 1)
        for at, tiles in stacks(T)
    ]
    return torch.cat(found) if len(found) > 1 else found[0]


def each_tile(function: Callable[[Tensor], Tensor], T: Float[Tensor, "d b"]) -> Tensor:
    """A function of each tile, with a tile of the same size as its result, tiled again."""
    result = torch.zeros_like(T)
    for at, tiles in stacks(T):
        result[at, : tiles.shape[2]] = function(tiles).flatten(0, 1)
    return result


def stacks(T: Float[Tensor, "d b"]) -> Iterator[tuple[slice, Float[Tensor, "p s s"]]]:
    """Rows, and their tiles stacked: all of full size, and then the last if it is smaller."""
    d, size = T.shape
    whole = d // size * size
    yield slice(0, whole), T[:whole].unflatten(0, (-1, size))
    if whole < d:
        yield slice(whole, d), T[whole:, : d - whole].unsqueeze(0)


def diagonal_of(T: Float[Tensor, "d b"]) -> Float[Tensor, " d"]:
    """The diagonal."""
    return T.gather(1, _columns(T)).squeeze(1)


def plus_diagonal(T: Float[Tensor, "d b"], amount: Tensor) -> Float[Tensor, "d b"]:
    """T + amount · I."""
    at = _columns(T)
    return T.scatter_add(1, at, amount.to(T).expand(at.shape))


def _columns(T: Tensor) -> Tensor:
    """In which column of its row each entry of the diagonal lies."""
    d, size = T.shape
    return (torch.arange(d, device=T.device) % size).unsqueeze(1)


def _places(d: int, size: int) -> Iterator[slice]:
    for start in range(0, d, size):
        yield slice(start, min(start + size, d))
