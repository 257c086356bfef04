"""``gn.alignment`` beside dense matrices."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from tests.problems import LOSSES, network


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))


def dense_gradient(net: nn.Module, criterion: nn.Module, batch) -> dict[str, Tensor]:
    """Each layer's gradient as vec([W | b]), column by column, by plain autograd."""
    net.zero_grad()
    criterion(net(batch[0]), batch[1]).backward()
    result = {}
    for i, layer in enumerate(net.layers):
        parts = [layer.weight.grad, layer.bias.grad[:, None]]
        result[f"layers.{i}"] = torch.cat(parts, 1).T.reshape(-1).clone()
    net.zero_grad()
    return result


@pytest.mark.parametrize("loss", ["mse", "cross-entropy", "mixture"])
def test_cosines_are_those_of_dense_solves(loss: str) -> None:
    net, k = network([4, 5, 3]), 0.01
    criterion = LOSSES[loss].make("mean")
    batch = torch.randn(30, 4).double(), LOSSES[loss].targets(30, 3)
    result = gn.alignment(net, criterion, batch, ("kfra", "kflr"), damping=k, tolerance=1e-10)
    assert result.converged
    g = dense_gradient(net, criterion, batch)
    G = gn.exact.gauss_newton(net, criterion, batch)
    full = torch.linalg.solve(G + k * torch.eye(len(G)).double(), torch.cat(list(g.values())))
    blocks = gn.exact.gauss_newton_blocks(net, criterion, batch)
    exact = {
        name: torch.linalg.solve(B + k * torch.eye(len(B)).double(), g[name])
        for name, B in blocks.items()
    }
    assert result.block_diagonal == pytest.approx(cosine(torch.cat(list(exact.values())), full))
    for method in ("kfra", "kflr"):
        c = gn.curvature(net, criterion, batch, method=method)
        for star in ("", "*"):
            approximate = {}
            for name, block in c.items():
                if star:
                    w = block.omega()
                    Q = block.Q + w * k**0.5 * torch.eye(block.columns).double()
                    C = torch.kron(Q, block.G + k**0.5 / w * torch.eye(block.rows).double())
                else:
                    C = block.dense() + k * torch.eye(len(block.dense())).double()
                approximate[name] = torch.linalg.solve(C, g[name])
                found = result.layers[name][method + star]
                assert found == pytest.approx(cosine(approximate[name], exact[name]), abs=1e-7)
            whole = cosine(torch.cat(list(approximate.values())), full)
            assert result.whole[method + star] == pytest.approx(whole, abs=1e-7)
            assert whole < 0.9999  # else the comparison would show nothing


def test_one_datum_is_aligned_in_each_layer_where_the_factors_are_exact() -> None:
    net = network([4, 5, 6, 3])
    batch = torch.randn(1, 4).double(), torch.randn(1, 3).double()
    result = gn.alignment(net, nn.MSELoss(), batch, ("kfra", "kflr"), damping=0.1, tolerance=1e-12)
    for cosines in result.layers.values():
        assert cosines["kfra"] == pytest.approx(1, abs=1e-9)
        assert cosines["kflr"] == pytest.approx(1, abs=1e-9)
    assert result.whole["kflr"] == pytest.approx(result.block_diagonal, abs=1e-9)
    assert result.whole["kflr"] < 0.999  # the blocks leave out what lies between the layers


def test_a_single_linear_layer_with_squared_error_is_exact() -> None:
    net = network([6, 4])
    batch = torch.randn(50, 6).double(), torch.randn(50, 4).double()
    result = gn.alignment(
        net, nn.MSELoss(), batch, ("kfra", "kfac", "kflr"), damping=1.0, tolerance=1e-12
    )
    for step in ("kfra", "kflr"):
        assert result.layers["layers.0"][step] == pytest.approx(1, abs=1e-9)
        assert result.whole[step] == pytest.approx(1, abs=1e-9)
    assert result.whole["kfac"] < 1 - 1e-6  # sampled
    assert result.block_diagonal == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("loss", ["mse", "cross-entropy", "mixture"])
def test_block_products_are_the_blocks(loss: str) -> None:
    net, criterion = network([4, 5, 3]), LOSSES[loss].make("mean")
    batch = torch.randn(8, 4).double(), LOSSES[loss].targets(8, 3)
    products = gn.exact.gauss_newton_block_products(net, criterion, batch, damping=0.3)
    blocks = gn.exact.gauss_newton_blocks(net, criterion, batch)
    assert list(products) == list(blocks)
    for name, block in blocks.items():
        v = torch.randn(len(block)).double()
        torch.testing.assert_close(products[name](v), block @ v + 0.3 * v)
        with pytest.raises(ValueError, match="does not fit"):
            products[name](v[1:])
    with pytest.raises(ValueError, match="must not be negative"):
        gn.exact.gauss_newton_block_products(net, criterion, batch, damping=-1.0)


def test_too_few_iterations_are_admitted_with_the_true_residual() -> None:
    net, criterion, k = network([4, 5, 3]), nn.CrossEntropyLoss(), 1e-3
    batch = torch.randn(30, 4).double(), torch.randint(3, (30,))
    result = gn.alignment(net, criterion, batch, "kfra", "exact", damping=k, max_iterations=2)
    assert not result.converged
    assert not result.whole_solve.converged
    assert result.whole_solve.iterations == 2
    assert "NOT all reference steps converged" in str(result)
    g = torch.cat(list(dense_gradient(net, criterion, batch).values()))
    A = gn.exact.gauss_newton(net, criterion, batch) + k * torch.eye(len(g)).double()
    # Two steps of conjugate gradients are the best point of span{g, A g}.
    K = torch.stack([g, A @ g], 1)
    best = K @ torch.linalg.solve(K.T @ A @ K, K.T @ g)
    residual = (g - A @ best).norm() / g.norm()
    assert result.whole_solve.residual == pytest.approx(residual.item(), rel=1e-6)


def test_reference_damping_and_weight_decay() -> None:
    net, criterion, eta = network([4, 5, 3]), nn.CrossEntropyLoss(), 0.05
    batch = torch.randn(30, 4).double(), torch.randint(3, (30,))
    result = gn.alignment(
        net, criterion, batch, "kflr", "exact", damping=0.1, reference_damping=0.4,
        weight_decay=eta, tolerance=1e-12,
    )  # fmt: skip
    vec = gn.Theta(net).vector({key: p.detach() for key, p in net.named_parameters()})
    g = torch.cat(list(dense_gradient(net, criterion, batch).values())) + eta * vec
    A = gn.exact.gauss_newton(net, criterion, batch) + 0.4 * torch.eye(len(g)).double()
    mine = gn.curvature(net, criterion, batch).dense() + 0.1 * torch.eye(len(g)).double()
    expected = cosine(torch.linalg.solve(mine, g), torch.linalg.solve(A, g))
    assert result.whole["kflr"] == pytest.approx(expected, abs=1e-8)
    assert (result.damping, result.reference_damping) == (0.1, 0.4)


def test_the_table_and_plain_data(capsys) -> None:
    net = network([4, 5, 3])
    batch = torch.randn(30, 4).double(), torch.randint(3, (30,))
    estimator = gn.KFAC(samples=3)
    result = gn.alignment(
        net, nn.CrossEntropyLoss(), [batch], ["kfra", estimator], damping=0.01, show=True
    )
    printed = capsys.readouterr().out
    assert printed == f"{result}\n"
    header, _, first, *_ = printed.splitlines()
    assert header.split()[:3] == ["layer", "kfra", "kfra*"]
    assert repr(estimator) + "*" in header
    assert first.split()[1] == f"{result.layers['layers.0']['kfra']:.3f}"
    assert "whole, full GN" in printed
    assert "30 data" in printed
    assert json.loads(json.dumps(result.as_dict()))["whole"] == result.whole


def test_the_model_is_left_as_it_was() -> None:
    net = network([4, 5, 3])
    batch = torch.randn(6, 4).double(), torch.randint(3, (6,))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    net.layers[0].weight.grad = torch.ones_like(net.layers[0].weight)
    state = torch.get_rng_state()
    gn.alignment(net, nn.CrossEntropyLoss(), batch, damping=0.01)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
    assert bool((net.layers[0].weight.grad == 1).all())
    assert net.layers[1].weight.grad is None


def test_what_it_does_not_take() -> None:
    net = network([4, 3])
    batch = torch.randn(6, 4).double(), torch.randint(3, (6,))
    with pytest.raises(ValueError, match="above zero"):
        gn.alignment(net, nn.CrossEntropyLoss(), batch, damping=0.0)
    with pytest.raises(ValueError, match="at least one method"):
        gn.alignment(net, nn.CrossEntropyLoss(), batch, (), damping=0.1)
    with pytest.raises(gn.errors.BatchError, match="no batch at all"):
        gn.alignment(net, nn.CrossEntropyLoss(), iter(()), damping=0.1)
