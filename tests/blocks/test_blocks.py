from __future__ import annotations

import io

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.blocks import (
    Block,
    DenseBlock,
    DiagonalBlock,
    EigenBlock,
    GroupedBlock,
    KroneckerBlock,
    ScaledBlock,
)
from gaussnewton.blocks.curvature import load_block

F64 = torch.float64
WRONG_WORD = (ValueError, TypeCheckError)  # the second where annotations are checked


def psd(d: int, rank: int | None = None, dtype: torch.dtype = F64) -> Tensor:
    A = torch.randn(d, rank or d + 2, dtype=dtype)
    return A @ A.T / d


def kronecker(rows: int = 3, columns: int = 4) -> KroneckerBlock:
    return KroneckerBlock(Q=psd(columns), G=psd(rows))


def dense(rows: int = 3, columns: int = 4) -> DenseBlock:
    return DenseBlock(psd(rows * columns), rows, columns)


def diagonal(rows: int = 3, columns: int = 4) -> DiagonalBlock:
    return DiagonalBlock(torch.rand(rows, columns, dtype=F64))


def scaled(rows: int = 3, columns: int = 4) -> ScaledBlock:
    return ScaledBlock(torch.rand(rows, dtype=F64), psd(columns))


def grouped(columns: int = 4) -> GroupedBlock:
    return GroupedBlock((kronecker(1, columns), kronecker(2, columns)))


def eigen(rows: int = 3, columns: int = 4) -> EigenBlock:
    block = EigenBlock.of(psd(columns), psd(rows))
    return block.with_values(torch.rand(rows, columns, dtype=F64))


def grouped_eigen(columns: int = 4) -> GroupedBlock:
    return GroupedBlock((eigen(1, columns), eigen(2, columns)))


def vec(V: Tensor) -> Tensor:
    """Column by column, with a loop."""
    return torch.stack([V[i, j] for j in range(V.shape[1]) for i in range(V.shape[0])])


@pytest.mark.parametrize("make", [diagonal, grouped, scaled, eigen, grouped_eigen])
def test_what_becomes_of_other_blocks(make) -> None:
    block, other = make(), make()
    C, D = block.dense(), other.dense()
    torch.testing.assert_close(block.scaled(3.0).dense(), 3 * C)
    assert block.double().dense().dtype == F64
    loaded = load_block(block.state_dict())
    assert type(loaded) is type(block)
    assert torch.equal(loaded.dense(), C)
    if make is diagonal:
        torch.testing.assert_close(block.average(other, 0.7).dense(), 0.7 * C + 0.3 * D)
        merged = block.merge(other, (2, 3), (0.4, 0.6))
        torch.testing.assert_close(merged.dense(), 0.4 * C + 0.6 * D)
    elif make is scaled:
        average = block.average(other, 0.7)
        torch.testing.assert_close(average.f, 0.7 * block.f + 0.3 * other.f)
        merged = block.merge(other, (1, 3), (0.4, 0.6))
        torch.testing.assert_close(merged.f, 0.25 * block.f + 0.75 * other.f)
        torch.testing.assert_close(merged.M, 0.4 * block.M + 0.6 * other.M)
    elif make is eigen:
        average = block.average(other, 0.7)
        torch.testing.assert_close(average.Q, 0.7 * block.Q + 0.3 * other.Q)
        merged = block.merge(other, (1, 3), (0.4, 0.6))
        torch.testing.assert_close(merged.G, 0.4 * block.G + 0.6 * other.G)
    else:
        average = block.average(other, 0.7)
        torch.testing.assert_close(
            average.parts[1].Q, 0.7 * block.parts[1].Q + 0.3 * other.parts[1].Q
        )
    draws = torch.stack(
        [block.invert(0.5).sample(torch.Generator().manual_seed(i)) for i in range(4000)]
    )
    flat = draws.mT.flatten(1)
    expected = torch.linalg.inv(C + 0.5 * torch.eye(12, dtype=F64))
    assert (flat.T @ flat / 4000 - expected).abs().max() < 0.2


@pytest.mark.parametrize(
    "make", [kronecker, dense, diagonal, grouped, scaled, eigen, grouped_eigen]
)
def test_against_the_dense_matrix(make) -> None:
    block: Block = make()
    C, V, k = block.dense(), torch.randn(3, 4, dtype=F64), 0.3
    damped = C + k * torch.eye(12, dtype=F64)
    torch.testing.assert_close(vec(block @ V), C @ vec(V))
    torch.testing.assert_close(vec(block.solve(V, k)), torch.linalg.solve(damped, vec(V)))
    torch.testing.assert_close(block.trace(), C.trace())
    torch.testing.assert_close(block.logdet(k), torch.logdet(damped))


def in_basis(C: Tensor, block: EigenBlock) -> Tensor:
    """The diagonal of C in the eigenvectors of a block, entry by entry."""
    result = torch.zeros_like(block.values)
    for i in range(block.rows):
        for j in range(block.columns):
            u = vec(torch.outer(block.U_G[:, i], block.U_Q[:, j]))
            result[i, j] = u @ C @ u
    return result


def test_eigenvalues_together_are_the_diagonal_in_the_new_eigenvectors() -> None:
    block, other = eigen(), eigen()
    C, D = block.dense(), other.dense()
    average = block.average(other, 0.7)
    torch.testing.assert_close(average.values, in_basis(0.7 * C + 0.3 * D, average))
    merged = block.merge(other, (1, 3), (2.0, 0.5))
    torch.testing.assert_close(merged.values, in_basis(2 * C + 0.5 * D, merged))
    torch.testing.assert_close(merged.Q, 0.25 * block.Q + 0.75 * other.Q)
    for mixed in (average, merged, merged.scaled(7.0)):
        for U, factor in ((mixed.U_Q, mixed.Q), (mixed.U_G, mixed.G)):
            torch.testing.assert_close(U.T @ U, torch.eye(len(U), dtype=F64))
            inner = U.T @ factor @ U
            torch.testing.assert_close(inner, inner.diagonal().diag())


def test_eigenvalues_of_the_factors_are_a_kronecker_block() -> None:
    block = kronecker()
    same = EigenBlock.of(block.Q, block.G)
    torch.testing.assert_close(same.dense(), block.dense())
    parts = same.numbers()
    torch.testing.assert_close(same.with_numbers(parts).dense(), block.dense())
    inverse = same.invert(0.5, "factored")  # which is exact all the same
    torch.testing.assert_close(inverse.logdet(), block.logdet(0.5))
    with pytest.raises(ValueError, match="not be negative"):
        same.invert(-1.0)
    with pytest.raises(gn.errors.FactorisationError, match="damping above zero"):
        same.with_values(torch.zeros(3, 4, dtype=F64)).invert(0.0)


def test_groups_of_corrected_blocks_are_made_of_stacked_numbers() -> None:
    block = GroupedBlock((eigen(2), eigen(2)))
    numbers = block.numbers()
    assert {key: part.shape[0] for key, part in numbers.items()} == dict.fromkeys(
        ("Q", "G", "U_Q", "U_G", "values"), 2
    )
    torch.testing.assert_close(block.with_numbers(numbers).dense(), block.dense())
    assert block.kind == "Kronecker, corrected eigenvalues, 2 groups"
    average = block.average(GroupedBlock((eigen(2), eigen(2))), 1.0)
    torch.testing.assert_close(average.dense(), block.dense())


def test_dense_form_is_kron_of_q_and_g() -> None:
    block = kronecker(2, 3)
    C = block.dense()
    for b in range(3):
        for d in range(3):
            tile = C[2 * b : 2 * b + 2, 2 * d : 2 * d + 2]
            torch.testing.assert_close(tile, block.Q[b, d] * block.G)


def test_factored_damping_is_that_of_the_paper() -> None:
    block, V, k = kronecker(), torch.randn(3, 4, dtype=F64), 0.7
    trace_Q, trace_G = block.Q.trace(), block.G.trace()
    omega = ((trace_Q * 3) / (trace_G * 4)).sqrt()
    torch.testing.assert_close(block.omega(), omega)
    Q = block.Q + omega * k**0.5 * torch.eye(4, dtype=F64)
    G = block.G + k**0.5 / omega * torch.eye(3, dtype=F64)
    expected = torch.linalg.solve(torch.kron(Q, G), vec(V))
    torch.testing.assert_close(vec(block.solve(V, k, "factored")), expected)
    torch.testing.assert_close(block.logdet(k, "factored"), torch.logdet(torch.kron(Q, G)))


@pytest.mark.parametrize("zero", ["Q", "G"])
def test_omega_of_a_zero_factor_is_one(zero: str) -> None:
    factors = {"Q": psd(4), "G": psd(3)}
    factors[zero] = torch.zeros_like(factors[zero])
    block = KroneckerBlock(**factors)
    assert block.omega() == 1
    V = torch.ones(3, 4, dtype=F64)
    assert block.solve(V, 0.1, "factored").isfinite().all()
    torch.testing.assert_close(block.solve(V, 0.1), V / 0.1)


@pytest.mark.parametrize("inversion", ["exact", "factored"])
def test_samples_have_the_inverse_as_covariance(inversion: str) -> None:
    block, k = kronecker(2, 2), 0.5
    inverse = block.invert(k, inversion)
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([vec(inverse.sample(generator)) for _ in range(20_000)])
    columns = [vec(inverse.solve(e.reshape(2, 2).T)) for e in torch.eye(4, dtype=F64)]
    expected = torch.stack(columns, dim=1)
    covariance = draws.T @ draws / len(draws)
    assert (covariance - expected).norm() / expected.norm() < 0.05


def test_an_inverse_multiplied_out_is_the_same_inverse() -> None:
    block, V = kronecker(3, 5), torch.randn(3, 5, dtype=F64)
    inverse = block.invert(0.3, "factored")
    fast = inverse.multiplied_out()
    assert type(fast) is not type(inverse)
    torch.testing.assert_close(fast.solve(V), inverse.solve(V))
    torch.testing.assert_close(fast.logdet(), inverse.logdet())
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([vec(fast.sample(generator)) for _ in range(20_000)])
    columns = [vec(inverse.solve(e.reshape(5, 3).T)) for e in torch.eye(15, dtype=F64)]
    expected = torch.stack(columns, dim=1)
    assert (draws.T @ draws / len(draws) - expected).norm() / expected.norm() < 0.05


def test_dense_samples_have_the_inverse_as_covariance() -> None:
    block = dense(2, 2)
    inverse, generator = block.invert(0.5), torch.Generator().manual_seed(0)
    draws = torch.stack([vec(inverse.sample(generator)) for _ in range(20_000)])
    expected = torch.linalg.inv(block.dense() + 0.5 * torch.eye(4, dtype=F64))
    assert (draws.T @ draws / len(draws) - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("make", [kronecker, dense])
def test_running_average(make) -> None:
    old, new = make(), make()
    mixed = old.average(new, decay=0.9)
    if isinstance(old, KroneckerBlock):
        torch.testing.assert_close(mixed.Q, 0.9 * old.Q + 0.1 * new.Q)
        torch.testing.assert_close(mixed.G, 0.9 * old.G + 0.1 * new.G)
    else:
        torch.testing.assert_close(mixed.dense(), 0.9 * old.dense() + 0.1 * new.dense())


def test_singular_blocks_without_damping_are_refused_by_name() -> None:
    V = torch.ones(3, 4, dtype=F64)
    block = KroneckerBlock(Q=torch.zeros(4, 4, dtype=F64), G=psd(3))
    with pytest.raises(gn.errors.FactorisationError, match="damping above zero"):
        block.solve(V, 0.0)
    with pytest.raises(gn.errors.FactorisationError, match=r"factor Q.*more damping"):
        block.solve(V, 0.0, "factored")
    indefinite = DenseBlock(-torch.eye(12, dtype=F64), 3, 4)
    with pytest.raises(gn.errors.FactorisationError, match="row 1 of 12"):
        indefinite.solve(V, 0.5)
    with pytest.raises(ValueError, match="not be negative"):
        kronecker().solve(V, -1.0)
    with pytest.raises(WRONG_WORD):
        kronecker().solve(V, 1.0, "both")  # type: ignore[arg-type]
    block = dense()
    torch.testing.assert_close(block.solve(V, 1.0, "factored"), block.solve(V, 1.0))


@pytest.fixture
def problem() -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False)).double()
    return model, nn.CrossEntropyLoss(), (torch.randn(6, 4).double(), torch.randint(2, (6,)))


@pytest.mark.parametrize("method", ["kflr", "hessian"])
def test_curvature_acts_on_theta(problem, method: str) -> None:
    model, criterion, batch = problem
    curvature = gn.curvature(model, criterion, batch, method=method)
    C = curvature.dense()
    size = sum(p.numel() for p in model.parameters())
    assert C.shape == (size, size)
    v = torch.randn(size, dtype=F64)
    damped = C + 2.0 * torch.eye(size, dtype=F64)
    torch.testing.assert_close(curvature @ v, C @ v)
    torch.testing.assert_close(curvature.solve(v, 2.0), torch.linalg.solve(damped, v))
    torch.testing.assert_close(curvature.trace(), C.trace())
    torch.testing.assert_close(curvature.logdet(2.0), torch.logdet(damped))
    theta = gn.Theta(model)
    by_name = curvature @ theta.tensors(v)
    torch.testing.assert_close(theta.vector(by_name), C @ v)
    assert {k: t.shape for k, t in by_name.items()} == {
        k: p.shape for k, p in model.named_parameters()
    }
    drawn = curvature.sample(2.0, torch.Generator().manual_seed(0))
    assert drawn.keys() == by_name.keys()


@pytest.mark.parametrize("method", ["kflr", "hessian"])
def test_saved_and_loaded(problem, method: str) -> None:
    model, criterion, batch = problem
    curvature = gn.curvature(model, criterion, batch, method=method)
    file = io.BytesIO()
    torch.save(curvature.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again = gn.Curvature.from_state_dict(model, state)
    assert (again.data, again.weight) == (curvature.data, curvature.weight)
    torch.testing.assert_close(again.dense(), curvature.dense(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="does not fit layer ''"):
        gn.Curvature.from_state_dict(nn.Linear(2, 2), state)


def test_unknown_block_and_vector_of_the_wrong_size(problem) -> None:
    model, criterion, batch = problem
    curvature = gn.curvature(model, criterion, batch)
    with pytest.raises(KeyError, match="there are '0', '2'"):
        curvature["encoder"]
    with pytest.raises(ValueError, match="which has 21"):
        curvature @ torch.zeros(5).double()


def test_running_average_of_curvature(problem) -> None:
    model, criterion, (x, y) = problem
    old = gn.curvature(model, criterion, (x, y))
    new = gn.curvature(model, criterion, (2 * x, y))
    mixed = old.average(new, decay=0.9)
    torch.testing.assert_close(mixed["0"].Q, 0.9 * old["0"].Q + 0.1 * new["0"].Q)


def test_eigenvectors_by_way_of_float64_where_lapack_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it does in float32 for one in some 25 batches of 1000 CURVES."""
    Q, G = (torch.randn(9, d) for d in (4, 3))
    block = gn.KroneckerBlock(Q.T @ Q, G.T @ G)
    V, eigh = torch.randn(3, 4), torch.linalg.eigh
    expected = block.solve(V, damping=0.1)

    def stubborn(matrix: torch.Tensor) -> object:
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("failed to converge")
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", stubborn)
    found = block.solve(V, damping=0.1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)

    def hopeless(matrix: torch.Tensor) -> object:  # noqa: ARG001
        raise torch.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr(torch.linalg, "eigh", hopeless)
    with pytest.raises(gn.errors.FactorisationError, match="factor Q"):
        block.solve(V, damping=0.1)
