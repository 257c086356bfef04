"""Every form does what the matrices it stands for do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gaussnewton.perdatum import Dense, Diagonal, PerDatum, Roots, Shared, Softmax
from gaussnewton.perdatum.dense import psd_part, psd_root

N, D = 4, 6


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def softmax_matrices(p: Tensor, w: Tensor) -> Tensor:
    """w (diag(p) − p pᵀ) at each position, entry by entry."""
    n, c, s = p.shape
    result = torch.zeros(n, c * s, c * s, dtype=p.dtype)
    for i in range(n):
        for k in range(s):
            for a in range(c):
                for b in range(c):
                    value = (p[i, a, k] if a == b else 0) - p[i, a, k] * p[i, b, k]
                    result[i, a * s + k, b * s + k] = w[i, k] * value
    return result


def forms() -> dict[str, tuple[PerDatum, Tensor]]:
    torch.manual_seed(1)
    rows, few, values = rand(N, D + 2, D), rand(N, 2, D), rand(N, D)
    shared, slope = rand(3, D), rand(N, D)
    p, w = rand(N, 3, 2).softmax(1), rand(N, 2)
    sharp = (100 * rand(N, D, 1)).softmax(1)
    one = rand(N, 1, D)
    return {
        "roots": (Roots(rows.clone()), rows.mT @ rows),
        "few roots": (Roots(few.clone()), few.mT @ few),
        "dense": (Dense(rows.mT @ rows), rows.mT @ rows),
        "singular dense": (Dense(few.mT @ few), few.mT @ few),
        "diagonal": (Diagonal(values.clone(), N), torch.diag_embed(values)),
        "shared diagonal": (
            Diagonal(values[:1].clone(), N),
            torch.diag_embed(values[:1]).expand(N, D, D),
        ),
        "shared": (Shared(shared, N), (shared.T @ shared).expand(N, D, D)),
        "shared, scaled": (
            Shared(shared, N, slope),
            slope.unsqueeze(2) * (shared.T @ shared) * slope.unsqueeze(1),
        ),
        "softmax": (Softmax(p, w), softmax_matrices(p, w)),
        "sharp softmax": (
            Softmax(sharp, rand(N, 1) * 0 + 2),
            softmax_matrices(sharp, rand(N, 1) * 0 + 2),
        ),
        "one class": (Softmax(one.softmax(1), rand(N, D)), torch.zeros(N, D, D).double()),
    }


NAMES = list(forms())


@pytest.mark.parametrize("name", NAMES)
def test_reading(name: str) -> None:
    form, M = forms()[name]
    assert (form.data, form.width) == (N, D)
    torch.testing.assert_close(form.total(), M.sum(0))
    torch.testing.assert_close(form.dense(), M)
    R = form.roots().rows
    torch.testing.assert_close(R.mT @ R, M)
    for v in (rand(N, D), rand(3, N, D)):
        torch.testing.assert_close(form.product(v), torch.einsum("nij,...nj->...ni", M, v))
    v = rand(N, D)
    torch.testing.assert_close(form.quadratic(v), torch.einsum("ni,nij,nj->", v, M, v))
    ranks = torch.linalg.matrix_rank(M, hermitian=True)
    assert int(ranks.max()) <= form.rank


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [2, 6, 9])
def test_pull(name: str, width: int) -> None:
    form, M = forms()[name]
    W = rand(D, width)
    pulled = form.pull(W)
    assert pulled.width == width
    torch.testing.assert_close(pulled.dense(), W.T @ M @ W)
    torch.testing.assert_close(pulled.total(), (W.T @ M @ W).sum(0))


@pytest.mark.parametrize("name", NAMES)
def test_scale(name: str) -> None:
    form, M = forms()[name]
    B = torch.randn(N, D, dtype=torch.float64)
    expected = B.unsqueeze(2) * M * B.unsqueeze(1)
    torch.testing.assert_close(form.scale(B).dense(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_select_leaves_the_whole_alone(name: str) -> None:
    form, M = forms()[name]
    part = form.select(slice(1, 3))
    assert part.data == 2
    torch.testing.assert_close(part.dense(), M[1:3])
    part.scale(torch.full((2, D), 3.0).double())
    torch.testing.assert_close(form.dense(), M)


@pytest.mark.parametrize("name", NAMES)
def test_pull_through(name: str) -> None:
    form, M = forms()[name]
    J = rand(N, D, 5)
    pulled = form.pull_through(lambda rows: torch.einsum("kni,nij->knj", rows, J))
    torch.testing.assert_close(pulled.dense(), J.mT @ M @ J)


@pytest.mark.parametrize("name", NAMES)
def test_diagonal_in_a_basis(name: str) -> None:
    form, M = forms()[name]
    U = rand(D, 5) - 0.5
    expected = torch.stack([(U.T @ matrix @ U).diagonal() for matrix in M])
    torch.testing.assert_close(form.diagonal_in(U), expected)
    torch.testing.assert_close(form.dense(), M)  # and nothing has been overwritten


def test_softmax_rank_is_one_less_than_classes() -> None:
    form = Softmax(rand(N, 5, 1).softmax(1), rand(N, 1))
    assert form.roots().rows.shape == (N, 4, 5)


def test_psd_root_of_definite_and_singular_matrices_in_one_batch() -> None:
    A = torch.randn(3, 4, 4, dtype=torch.float64)
    M = A @ A.mT
    M[1] = torch.outer(A[1, 0], A[1, 0])
    M[2] = 0
    R = psd_root(M)
    torch.testing.assert_close(R.mT @ R, M)


def test_psd_part_clips_negative_eigenvalues_only() -> None:
    Q = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    M = Q @ torch.diag(torch.tensor([-2.0, 0.5, 3.0]).double()) @ Q.T
    expected = Q @ torch.diag(torch.tensor([0.0, 0.5, 3.0]).double()) @ Q.T
    torch.testing.assert_close(psd_part(M.unsqueeze(0))[0], expected)
