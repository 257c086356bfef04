"""Corrected eigenvalues beside loops over data, and as near to the exact blocks as they can be."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.estimators.corrected import squared_projections
from gaussnewton.foreseen import foreseen_blocks
from tests.estimators.test_shared import Linear, images, residual, twice
from tests.problems import LOSSES, fit, network, relative

Problem = tuple[nn.Module, nn.Module, tuple[Tensor, Any]]


def chain(bias: bool = True, n: int = 6) -> Problem:
    net = network([4, 5, 2, 3], bias=bias)
    return net, nn.CrossEntropyLoss(), (torch.randn(n, 4).double(), torch.randint(3, (n,)))


def positions(averaged: bool, n: int = 4) -> Problem:
    torch.manual_seed(0)
    model = Linear(averaged).double()
    x = torch.randn(n, 5, 3).double()
    return model, nn.MSELoss(reduction="sum"), (x, torch.randn_like(model(x)))


def convolution(n: int = 3) -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2))
    return (
        model.double(),
        nn.MSELoss(),
        (torch.randn(n, 4, 3, 3).double(), torch.randn(n, 2).double()),
    )


def in_a_graph(make, n: int = 4) -> Problem:
    model, batch = make(n)
    return model, nn.CrossEntropyLoss(), batch


PROBLEMS = {
    "chain": chain,
    "chain without bias": lambda: chain(bias=False),
    "positions": lambda: positions(False),
    "positions, averaged": lambda: positions(True),
    "groups": convolution,
    "images": lambda: in_a_graph(images),
    "residual": lambda: in_a_graph(residual),
    "called twice": lambda: in_a_graph(twice),
}


def parts_of(block: gn.Block) -> tuple[gn.EigenBlock, ...]:
    parts = block.parts if isinstance(block, gn.GroupedBlock) else (block,)
    assert all(isinstance(part, gn.EigenBlock) for part in parts)
    return parts


def slow_values(
    model: nn.Module, batch: tuple[Tensor, Any], roots: Tensor, curvature: gn.Curvature
) -> dict[str, list[Tensor]]:
    """Λ by one datum, one vector, one i and one j at a time, from autograd's own gradients."""
    named = dict(model.named_parameters())
    values = {
        name: [torch.zeros_like(part.values) for part in parts_of(block)]
        for name, block in curvature.items()
        if block.kind != "zero"  # of a layer that is not used
    }
    for x, rows in zip(batch[0], roots, strict=True):
        output = model(x.unsqueeze(0)).flatten()
        for row in rows:
            found = torch.autograd.grad(
                output @ row, list(named.values()), retain_graph=True, allow_unused=True
            )
            gradient = {
                key: torch.zeros_like(p) if g is None else g
                for (key, p), g in zip(named.items(), found, strict=True)
            }
            for group in (curvature.theta[name] for name in values):
                parts = parts_of(curvature[group.name])
                matrices = group.matrix(gradient).split([part.rows for part in parts])
                for total, part, M in zip(values[group.name], parts, matrices, strict=True):
                    for i in range(part.rows):
                        for j in range(part.columns):
                            total[i, j] += (part.U_G[:, i] @ M @ part.U_Q[:, j]) ** 2
    return values


def hessian_roots(model: nn.Module, criterion: nn.Module, batch: tuple[Tensor, Any]) -> Tensor:
    with torch.no_grad():
        outputs = model(batch[0])
    H = gn.exact.output_hessian(criterion, outputs, batch[1])
    values, U = torch.linalg.eigh(H)
    return (U * values.clamp(min=0).sqrt().unsqueeze(1)).mT


def drawn_roots(model: nn.Module, criterion: nn.Module, batch: tuple[Tensor, Any]) -> Tensor:
    with gn.Tape(model, criterion) as tape:
        criterion(model(batch[0]), batch[1])
    return gn.KFAC(samples=2, seed=3)._scores(tape.record)


def check_values(found: gn.Curvature, expected: dict[str, list[Tensor]]) -> None:
    for name, slow in expected.items():
        for part, values in zip(parts_of(found[name]), slow, strict=True):
            torch.testing.assert_close(part.values, values, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_kflr_is_a_loop_over_data(name: str, sharing: Any) -> None:
    model, criterion, batch = PROBLEMS[name]()
    method = gn.KFLR(sharing=sharing, eigenvalues="corrected")
    found = gn.curvature(model, criterion, batch, method=method)
    check_values(found, slow_values(model, batch, hessian_roots(model, criterion, batch), found))


@pytest.mark.parametrize("name", PROBLEMS)
def test_kfac_is_a_loop_over_data_with_the_same_draws(name: str) -> None:
    model, criterion, batch = PROBLEMS[name]()
    method = gn.KFAC(samples=2, seed=3, eigenvalues="corrected")
    found = gn.curvature(model, criterion, batch, method=method)
    check_values(found, slow_values(model, batch, drawn_roots(model, criterion, batch), found))


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_basis_is_that_of_the_factors(name: str) -> None:
    model, criterion, batch = PROBLEMS[name]()
    for kind in (gn.KFLR, gn.KFAC):
        found = gn.curvature(model, criterion, batch, method=kind(eigenvalues="corrected"))
        factored = gn.curvature(model, criterion, batch, method=kind())
        assert list(found) == list(factored)
        for layer, block in factored.items():
            if block.kind == "zero":  # of a layer that is not used
                continue
            originals = block.parts if isinstance(block, gn.GroupedBlock) else (block,)
            for part, original in zip(parts_of(found[layer]), originals, strict=True):
                assert torch.equal(part.Q, original.Q)
                assert torch.equal(part.G, original.G)
                for U, factor in ((part.U_Q, part.Q), (part.U_G, part.G)):
                    inner = U.T @ factor @ U
                    torch.testing.assert_close(inner, inner.diagonal().diag())


@pytest.mark.parametrize("workspace", [1, 3000, 2**26])
@pytest.mark.parametrize("name", PROBLEMS)
def test_nearer_to_the_exact_block_than_kronecker_factors(name: str, workspace: int) -> None:
    """No diagonal is nearer in this basis, and the product of eigenvalues is one."""
    model, criterion, batch = PROBLEMS[name]()
    method = gn.KFLR(workspace=workspace, eigenvalues="corrected")
    found = gn.curvature(model, criterion, batch, method=method)
    factored = gn.curvature(model, criterion, batch)
    exact = gn.exact.gauss_newton_blocks(model, criterion, batch)
    gains = []
    for layer, block in exact.items():
        near, far = (float((c[layer].dense() - block).norm()) for c in (found, factored))
        assert near <= far + 1e-12 * float(block.norm())
        torch.testing.assert_close(found[layer].trace(), block.trace())
        gains.append(far - near)
    # Of a deep linear network whose loss adds up positions the factors are exact already.
    assert name == "positions" or max(gains) > 1e-3 * max(float(C.norm()) for C in exact.values())


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_has_the_diagonal_of_the_exact_block(loss: str) -> None:
    case = LOSSES[loss]
    width = case.outputs or 3
    net = network([4, 5, 2, width])
    batch = torch.randn(6, 4).double(), case.targets(6, width)
    criterion = case.make("mean")
    exact = gn.exact.gauss_newton_blocks(net, criterion, batch)
    for workspace in (1, 2**26):
        method = gn.KFLR(workspace=workspace, eigenvalues="corrected")
        found = gn.curvature(net, criterion, batch, method=method)
        for name, C in exact.items():
            U = torch.kron(found[name].U_Q, found[name].U_G)
            expected = (U.T @ C @ U).diagonal().reshape(found[name].values.T.shape).T
            torch.testing.assert_close(found[name].values, expected, rtol=1e-8, atol=1e-12)


def test_one_datum_is_exact_where_the_factors_are() -> None:
    for model, criterion, batch in (chain(n=1), in_a_graph(residual, 1)):
        method = gn.KFLR(eigenvalues="corrected")
        found = gn.curvature(model, criterion, batch, method=method)
        for name, C in gn.exact.gauss_newton_blocks(model, criterion, batch).items():
            assert (found[name].dense() - C).norm() <= 1e-10 * C.norm()


@pytest.mark.parametrize("r", [1, 2, 40])
def test_projected_before_or_after_positions_are_summed(r: int) -> None:
    torch.manual_seed(0)
    g, a = torch.randn(2, 3, r, 4).double(), torch.randn(3, r, 5).double()
    Q, G = (M @ M.T for M in (torch.randn(5, 5).double(), torch.randn(4, 4).double()))
    basis = gn.EigenBlock.of(Q, G)
    M = torch.einsum("knro,nrc->knoc", g, a)
    expected = torch.einsum("knoc,oi,cj->knij", M, basis.U_G, basis.U_Q).square().sum((0, 1))
    torch.testing.assert_close(squared_projections(g, a, basis.U_G, basis.U_Q), expected)


def test_small_layers_and_tables_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 2)
    ).double()
    batch = torch.randint(7, (5, 3)), torch.randint(2, (5,))
    method = gn.KFLR(eigenvalues="corrected")
    found = gn.curvature(model, nn.CrossEntropyLoss(), batch, method=method)
    plain = gn.curvature(model, nn.CrossEntropyLoss(), batch)
    kinds = [type(block) for block in found.values()]
    assert kinds == [gn.ScaledBlock, gn.DenseBlock, gn.EigenBlock]
    for name in ("0", "1"):
        assert torch.equal(found[name].dense(), plain[name].dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["chain", "images"])
def test_in_other_precisions(name: str, dtype: torch.dtype) -> None:
    model, criterion, (x, y) = PROBLEMS[name]()
    method = gn.KFLR(eigenvalues="corrected")
    wide = gn.curvature(model, criterion, (x, y), method=method)
    low = gn.curvature(model.to(dtype), criterion, (x.to(dtype), y), method=method)
    for layer, block in wide.items():
        assert all(part.dtype == torch.float32 for part in low[layer].numbers().values())
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        assert relative(low[layer].trace().double(), block.trace()) < tolerance


def test_batches_together() -> None:
    """Q, G and the trace are those of all data at once; Λ is what is known of it."""
    model, criterion, (x, y) = chain(n=8)
    method = gn.KFLR(eigenvalues="corrected")
    whole = gn.curvature(model, criterion, (x, y), method=method)
    parts = [(x[:3], y[:3]), (x[3:], y[3:])]
    merged = gn.curvature(model, criterion, parts, method=method)
    exact = gn.exact.gauss_newton_blocks(model, criterion, (x, y))
    for name, block in whole.items():
        assert relative(merged[name].Q, block.Q) < 1e-12
        assert relative(merged[name].G, block.G) < 1e-12
        assert relative(merged[name].trace(), exact[name].trace()) < 1e-12
        assert relative(merged[name].values, block.values) < 0.5
    with pytest.raises(ValueError, match="one kind of block"):
        whole.average(gn.curvature(model, criterion, (x, y)))


@pytest.mark.parametrize("name", ["chain", "images"])
def test_saved_loaded_and_copied(name: str) -> None:
    model, criterion, batch = PROBLEMS[name]()
    found = gn.curvature(model, criterion, batch, method=gn.KFAC(eigenvalues="corrected"))
    file = io.BytesIO()
    torch.save(found.state_dict(), file)
    file.seek(0)
    again = gn.Curvature.from_state_dict(model, torch.load(file, weights_only=True))
    for other in (again, copy.deepcopy(found)):
        assert torch.equal(other.dense(), found.dense())
        mixed, expected = other.average(found, 0.5), found.average(found, 0.5)
        assert torch.equal(mixed.dense(), expected.dense())


def test_nothing_is_known_of_single_data_in_kfra() -> None:
    with pytest.raises(ValueError, match=r"KFRA has no corrected eigenvalues.*gn\.KFLR"):
        gn.KFRA(eigenvalues="corrected")
    for kind in (gn.KFLR, gn.KFAC, gn.KFRA):
        with pytest.raises((ValueError, TypeCheckError)):
            kind(eigenvalues="right")
    assert "eigenvalues='corrected'" in repr(gn.KFAC(eigenvalues="corrected"))


def test_infinite_inputs_are_said_to_be_so() -> None:
    for make in (chain, convolution):
        model, criterion, (x, y) = make()
        with pytest.raises(gn.errors.NonFiniteError, match="curvature of layer"):
            gn.curvature(model, criterion, (x * 1e200, y), method=gn.KFLR(eigenvalues="corrected"))


def test_verify_holds_it_to_q_and_g() -> None:
    model, criterion, batch = chain()
    report = gn.verify(model, criterion, batch, methods=[gn.KFLR(eigenvalues="corrected")])
    assert report.ok
    assert all(row.G_error is not None for row in report.rows)


@pytest.mark.parametrize("name", ["chain", "images"])
def test_the_block_foreseen_is_of_the_kind_of_the_one_found(name: str) -> None:
    model, criterion, batch = PROBLEMS[name]()
    found = gn.curvature(model, criterion, batch, method=gn.KFAC(eigenvalues="corrected"))
    foreseen = foreseen_blocks(model, found.theta, "corrected")
    for group in found.theta:
        blocks = (foreseen[group.name].block, found[group.name])
        assert blocks[0].kind == blocks[1].kind
        shapes = [{k: (t.shape, t.dtype) for k, t in b.numbers().items()} for b in blocks]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("method", [gn.KFLR, gn.KFAC])
@pytest.mark.parametrize("name", ["chain", "images", "residual"])
def test_the_optimiser_trains_and_resumes_bit_for_bit(name: str, method: Any) -> None:
    model, _, (x, _) = PROBLEMS[name]()
    torch.manual_seed(1)
    x = torch.randn(40, *x.shape[1:]).double()
    y = (x.flatten(1).sum(1) > 0).long()
    criterion = nn.CrossEntropyLoss()
    optimizer = gn.GaussNewton(model, criterion, curvature=method(eigenvalues="corrected"))
    assert "Kronecker, corrected eigenvalues" in optimizer.explain()
    losses = fit(optimizer, x, y, 12)
    assert losses[-1] < 0.6 * losses[0]
    twin = copy.deepcopy(model)
    same = method(eigenvalues="corrected")
    other = gn.GaussNewton(twin, nn.CrossEntropyLoss(), curvature=same)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert fit(optimizer, x, y, 4) == fit(other, x, y, 4)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
