"""GaussNewton: the paper to the letter, what is invariant, and what never breaks a run."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from tests.literal import LiteralPaper
from tests.problems import network, relative


def problem(
    n: int = 40, sizes: tuple[int, ...] = (5, 6, 4, 3), seed: int = 0
) -> tuple[nn.Module, Tensor, Tensor]:
    net = network(list(sizes), seed=seed)
    x = torch.randn(n, sizes[0], dtype=torch.float64)
    y = torch.stack([x[:, i % sizes[0]] * x[:, (i + 1) % sizes[0]] for i in range(sizes[-1])], 1)
    return net, x, y


def train(optimizer: gn.GaussNewton, x: Tensor, y: Tensor, updates: int) -> list[float]:
    losses = []
    for _ in range(updates):
        optimizer.zero_grad()
        loss = optimizer.criterion(optimizer.model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("eta", [0.0, 1e-3])
def test_paper_to_the_letter(eta: float) -> None:
    net, x, y = problem(n=12)
    twin, criterion, tau = copy.deepcopy(net), nn.MSELoss(), 0.3
    literal = LiteralPaper(twin, nn.MSELoss(), tau, eta)
    settings = gn.PAPER | {"damping": replace(gn.PAPER["damping"], tau=tau)}
    optimizer = gn.GaussNewton(net, criterion, weight_decay=eta, **settings)
    for i in range(25):
        part = slice(0, 8) if i % 2 else slice(4, 12)
        train(optimizer, x[part], y[part], 1)
        literal.step(x[part], y[part])
        found = optimizer.diagnostics
        assert found["tau"] == pytest.approx(literal.tau, rel=1e-8)
        assert found["gamma"] == pytest.approx(literal.gamma, rel=1e-8)
        assert found["alpha"] == pytest.approx(float(literal.alpha), rel=1e-8)
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            assert relative(p, q) < 1e-8
    for key, value in optimizer.averaged_parameters().items():
        assert relative(value, literal.average[key]) < 1e-8


@pytest.mark.parametrize("settings", [{}, gn.PAPER], ids=["default", "paper"])
def test_scale_of_the_loss_does_not_matter(settings: dict) -> None:
    net, x, y = problem()
    other = copy.deepcopy(net)
    train(gn.GaussNewton(net, nn.MSELoss(), **settings), x, y, 20)
    train(gn.GaussNewton(other, nn.MSELoss(reduction="sum"), **settings), x, y, 20)
    assert relative(net(x), other(x)) < 1e-6


@pytest.mark.parametrize("settings", [{}, gn.PAPER], ids=["default", "paper"])
def test_permuted_hidden_units_do_not_matter(settings: dict) -> None:
    net, x, y = problem()
    other = copy.deepcopy(net)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    with torch.no_grad():
        other.layers[0].weight.copy_(net.layers[0].weight[order])
        other.layers[0].bias.copy_(net.layers[0].bias[order])
        other.layers[1].weight.copy_(net.layers[1].weight[:, order])
    train(gn.GaussNewton(net, nn.MSELoss(), **settings), x, y, 20)
    train(gn.GaussNewton(other, nn.MSELoss(), **settings), x, y, 20)
    assert relative(net(x), other(x)) < 1e-6


@pytest.mark.parametrize("method", ["auto", "kflr", "kfra", "kfac"])
@pytest.mark.parametrize("inversion", ["factored", "exact"])
def test_ends_below_adam(method: str, inversion: str) -> None:
    net, x, y = problem(n=200)
    other = copy.deepcopy(net)
    optimizer = gn.GaussNewton(net, nn.MSELoss(), curvature=method, inversion=inversion)
    train(optimizer, x, y, 60)
    adam = torch.optim.Adam(other.parameters(), lr=1e-3)
    for _ in range(60):
        adam.zero_grad()
        nn.MSELoss()(other(x), y).backward()
        adam.step()
    assert nn.MSELoss()(net(x), y) < 0.5 * nn.MSELoss()(other(x), y)


def test_skips_what_is_not_finite_and_gives_up_in_the_end() -> None:
    net, x, y = problem()
    optimizer = gn.GaussNewton(net, nn.MSELoss(), guard=gn.Guard(patience=2))
    train(optimizer, x, y, 3)
    before, state = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    bad = x.clone()
    bad[0, 0] = float("nan")
    train(optimizer, bad, y, 2)
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])
    after = optimizer.state_dict()
    for i, part in state["state"].items():
        for key, value in part.items():
            same = torch.equal(value, after["state"][i][key]) if isinstance(value, Tensor) else True
            assert same, key
    train(optimizer, x, y, 1)
    assert optimizer.param_groups[0]["progress"]["skipped"] == 2
    with pytest.raises(gn.errors.NonFiniteError, match="3 steps in a row"):
        train(optimizer, bad, y, 3)


def test_refuses_a_step_that_raises_the_loss() -> None:
    """Cubes of cubes: far from any quadratic, and hardly damped."""
    net = network([5, 6, 6, 3], "x³")
    x, y = 2 * torch.randn(40, 5).double(), torch.randn(40, 3).double()
    optimizer = gn.GaussNewton(
        net,
        nn.MSELoss(),
        curvature="kflr",
        damping=gn.Damping(tau=1e-9, tau_interval=1),
        step_size=gn.StepSize(momentum=False, calibrate=False),
    )
    with torch.no_grad():
        net.layers[0].weight.mul_(0.1)
    before = [p.clone() for p in net.parameters()]
    train(optimizer, x, y, 1)
    assert optimizer.diagnostics["rho"] < -1
    assert optimizer.diagnostics["refused"] == 1
    assert optimizer.diagnostics["tau"] > 1e-9
    for p, q in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_factorisations_that_fail_are_mended() -> None:
    """An indefinite factor: more damping helps, and where nothing does the last inverse stays."""
    net, x, y = problem()
    optimizer = gn.GaussNewton(net, nn.MSELoss(), refresh=gn.Refresh(curvature=100, inverse=1))
    train(optimizer, x, y, 2)
    state = optimizer.state[net.layers[0].weight]
    state["Q"] = state["Q"] - 0.5 * optimizer.diagnostics["tau"] ** 0.5 * torch.eye(6).double() * 3
    losses = train(optimizer, x, y, 3)
    state["Q"] = -1e12 * torch.eye(6).double()
    losses += train(optimizer, x, y, 3)
    assert all(torch.isfinite(torch.tensor(losses)))
    assert optimizer.diagnostics["mended"] > 0
    assert losses[-1] < losses[0]


def test_diagnostics_are_plain_numbers() -> None:
    net, x, y = problem()
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    train(optimizer, x, y, 5)
    found = optimizer.diagnostics
    assert found["rho"] == pytest.approx(found["actual"] / found["predicted"])
    for value in [v for v in found.values() if not isinstance(v, dict)] + [
        *found["scales"].values()
    ]:
        assert isinstance(value, (int, float))
    assert "layers.1" in optimizer.explain()
