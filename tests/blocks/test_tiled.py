"""Blocks in tiles, beside Kronecker products of block-diagonal matrices written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gaussnewton as gn
from gaussnewton.blocks import Block, EigenBlock, GroupedBlock, KroneckerBlock, ScaledBlock
from gaussnewton.blocks.bounded import bounded
from gaussnewton.blocks.curvature import load_block
from gaussnewton.blocks.joining import block_of
from gaussnewton.blocks.nearest import nearest_kronecker
from gaussnewton.explaining import multiplications
from gaussnewton.tiles import tile_size, tiled, tiled_diagonal, tiled_gram, times, untiled
from tests.blocks.test_blocks import psd, vec

F64 = torch.float64
LIMITS = [1, 2, 3, 4, 6, 100]
"""Of factors 7 and 5 wide: a diagonal, tiles that do and do not divide it, and no tiles."""


def cut(matrix: Tensor, largest: int) -> Tensor:
    """With zeros wherever two entries lie in different tiles; entry by entry."""
    d = len(matrix)
    count = -(-d // largest)
    size = -(-d // count)
    result = torch.zeros_like(matrix)
    for i in range(d):
        for j in range(d):
            if i // size == j // size:
                result[i, j] = matrix[i, j]
    return result


def pair(largest: int, rows: int = 5, columns: int = 7) -> tuple[Block, KroneckerBlock]:
    """A block in tiles, and the same with its zeros."""
    Q, G = psd(columns), psd(rows)
    whole = KroneckerBlock(cut(Q, largest), cut(G, largest))
    return bounded(KroneckerBlock(Q, G), largest), whole


@pytest.mark.parametrize("largest", LIMITS)
@pytest.mark.parametrize("inversion", ["exact", "factored"])
def test_against_the_whole_matrix(largest: int, inversion: str) -> None:
    (block, whole), V, k = pair(largest), torch.randn(5, 7, dtype=F64), 0.3
    C = whole.dense()
    torch.testing.assert_close(block.dense(), C)
    torch.testing.assert_close(vec(block @ V), C @ vec(V))
    torch.testing.assert_close(block.trace(), C.trace())
    torch.testing.assert_close(block.solve(V, k, inversion), whole.solve(V, k, inversion))
    torch.testing.assert_close(block.logdet(k, inversion), whole.logdet(k, inversion))
    if inversion == "exact":
        damped = C + k * torch.eye(35, dtype=F64)
        torch.testing.assert_close(vec(block.solve(V, k)), torch.linalg.solve(damped, vec(V)))
        torch.testing.assert_close(block.logdet(k), torch.logdet(damped))


@pytest.mark.parametrize("largest", [1, 2])
@pytest.mark.parametrize("inversion", ["exact", "factored"])
def test_samples_have_the_inverse_as_covariance(largest: int, inversion: str) -> None:
    block, _ = pair(largest, 2, 3)
    inverse, generator = block.invert(0.5, inversion), torch.Generator().manual_seed(0)
    draws = torch.stack([vec(inverse.sample(generator)) for _ in range(20_000)])
    columns = [vec(inverse.solve(e.reshape(3, 2).T)) for e in torch.eye(6, dtype=F64)]
    expected = torch.stack(columns, dim=1)
    assert (draws.T @ draws / len(draws) - expected).norm() / expected.norm() < 0.05


def test_a_limit_that_nothing_exceeds_changes_nothing() -> None:
    block = KroneckerBlock(psd(7), psd(5))
    assert bounded(block, 7) is block
    assert bounded(block, None) is block
    assert bounded(block, 6) is not block


def test_averages_merging_scaling_and_saving() -> None:
    (block, whole), (other, theirs) = pair(3), pair(3)
    V = torch.randn(5, 7, dtype=F64)
    for mine, expected in (
        (block.average(other, 0.7), whole.average(theirs, 0.7)),
        (block.merge(other, (1, 3), (2.0, 0.5)), whole.merge(theirs, (1, 3), (2.0, 0.5))),
        (block.scaled(3.0), whole.scaled(3.0)),
        (load_block(block.state_dict()), whole),
        (block.with_numbers(block.numbers()), whole),
        (block_of(block.numbers(), 5, 7), whole),
    ):
        assert isinstance(mine, gn.TiledBlock)
        torch.testing.assert_close(mine.dense(), expected.dense())
        torch.testing.assert_close(mine.solve(V, 0.1), expected.solve(V, 0.1))
    assert block_of(block.numbers(), 5, 8) is None
    narrow = gn.TiledBlock(block.Q.float(), block.G.float())  # type: ignore[attr-defined]
    assert narrow.double().Q.dtype == F64


def test_groups_and_tables_and_corrected_blocks() -> None:
    parts = tuple(KroneckerBlock(psd(7), psd(3)) for _ in range(2))
    grouped = bounded(GroupedBlock(parts), 2)
    expected = GroupedBlock(tuple(KroneckerBlock(cut(p.Q, 2), cut(p.G, 2)) for p in parts))
    V = torch.randn(6, 7, dtype=F64)
    torch.testing.assert_close(grouped @ V, expected @ V)
    torch.testing.assert_close(grouped.dense(), expected.dense())
    again = block_of(grouped.numbers(), 6, 7)
    assert again is not None
    assert again.kind == grouped.kind
    torch.testing.assert_close(again.dense(), expected.dense())
    torch.testing.assert_close(load_block(grouped.state_dict()).dense(), expected.dense())

    table = ScaledBlock(torch.rand(9, dtype=F64), psd(7))
    assert bounded(table, 7) is table  # rows are diagonal as it is
    small = ScaledBlock(table.f, cut(table.M, 3))
    torch.testing.assert_close(bounded(table, 3).dense(), small.dense())

    eigen = EigenBlock.of(psd(7), psd(5))
    other = eigen.with_values(torch.rand(5, 7, dtype=F64))
    assert bounded(other, 7) is other
    factored = KroneckerBlock(cut(other.Q, 3), cut(other.G, 3))
    torch.testing.assert_close(bounded(other, 3).dense(), factored.dense())


@pytest.mark.parametrize("largest", [1, 2, 5])
def test_nearest_to_a_table_and_a_matrix_in_tiles(largest: int) -> None:
    """The leading singular pair of the rearranged sum, by an SVD of it."""
    table = ScaledBlock(torch.rand(5, dtype=F64), psd(7))
    head = KroneckerBlock(psd(7), psd(5))
    found = nearest_kronecker([bounded(table, largest), bounded(head, largest)])
    terms = [(cut(table.M, largest), table.f.diag()), (cut(head.Q, largest), cut(head.G, largest))]
    rearranged = sum(torch.outer(C.reshape(-1), R.reshape(-1)) for C, R in terms)
    assert isinstance(rearranged, Tensor)
    U, s, Vt = torch.linalg.svd(rearranged)
    best = torch.kron((s[0] * U[:, 0]).reshape(7, 7), Vt[0].reshape(5, 5))
    torch.testing.assert_close(found.dense(), best)


def test_what_cannot_be_inverted_is_refused() -> None:
    zero = gn.TiledBlock(torch.zeros(4, 2, dtype=F64), torch.eye(2, dtype=F64))
    with pytest.raises(gn.errors.FactorisationError, match="damping above zero"):
        zero.invert(0.0)
    with pytest.raises(gn.errors.FactorisationError, match="tile of the damped factor Q"):
        zero.invert(0.0, "factored")
    with pytest.raises(gn.errors.FactorisationError, match="tile of the damped factor Q"):
        gn.TiledBlock(torch.zeros(4, 1, dtype=F64), psd(2)).invert(0.0, "factored")
    with pytest.raises(ValueError, match="not be negative"):
        zero.invert(-1.0)
    assert zero.omega() == 1


@pytest.mark.parametrize("d", [1, 2, 7, 10])
@pytest.mark.parametrize("largest", LIMITS)
def test_tiled_matrices(d: int, largest: int) -> None:
    x, V = torch.randn(9, d, dtype=F64), torch.randn(d, 3, dtype=F64)
    expected = cut(x.T @ x, largest)
    T = tiled_gram(x, largest)
    assert T.shape == (d, tile_size(d, largest))
    assert tile_size(d, largest) <= largest
    torch.testing.assert_close(untiled(T), expected)
    torch.testing.assert_close(untiled(tiled(x.T @ x, largest)), expected)
    torch.testing.assert_close(times(T, V), expected @ V)
    torch.testing.assert_close(untiled(tiled_diagonal(V[:, 0], largest)), V[:, 0].diag())
    assert tile_size(d, tile_size(d, largest)) == tile_size(d, largest)


def test_a_vocabulary_is_diagonal() -> None:
    assert tile_size(20_000, 4096) == 4000
    assert tile_size(20_001, 4096) == 1
    assert tile_size(20_001, None) == 20_001
    block = gn.TiledBlock(torch.rand(3, 3), torch.rand(30_000, 1))
    assert multiplications(block) == 27 + 30_000
    V = torch.randn(30_000, 3)
    torch.testing.assert_close(block @ V, block.G * (V @ block.Q.T), rtol=1e-4, atol=1e-5)
