from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

import gaussnewton as gn
from tests.problems import fit, network, relative
from tests.test_optimizer import problem


def test_one_step_solves_the_damped_system() -> None:
    """A linear network and squared error: the model is exact, so is the step."""
    net, criterion = network([4, 3]), nn.MSELoss()
    x, y = torch.randn(30, 4).double(), torch.randn(30, 3).double()
    theta = gn.Theta(net)
    start = theta.vector(dict(net.named_parameters())).detach()
    optimizer = gn.HessianFree(net, criterion, damping=1e-6, iterations=200)
    criterion(net(x), y).backward()
    g = theta.vector({name: p.grad for name, p in net.named_parameters()})
    optimizer.step()
    moved = theta.vector(dict(net.named_parameters())).detach() - start
    tau = optimizer.param_groups[0]["progress"]["first_tau"]
    G = gn.exact.gauss_newton(net, criterion, (x, y))
    expected = -torch.linalg.solve(G + tau * torch.eye(len(G), dtype=G.dtype), g)
    assert relative(moved, expected) < 0.05  # Martens' rule stops before the end
    assert optimizer.diagnostics["rho"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("precondition", [False, True])
def test_lowers_the_loss_at_every_step_and_ends_below_adam(precondition: bool) -> None:
    net, x, y = problem(n=200)
    other = copy.deepcopy(net)
    optimizer = gn.HessianFree(net, nn.MSELoss(), precondition=precondition)
    losses = fit(optimizer, x, y, 25)
    assert all(b <= a for a, b in itertools.pairwise(losses))
    adam = torch.optim.Adam(other.parameters(), lr=1e-3)
    for _ in range(25):
        adam.zero_grad()
        nn.MSELoss()(other(x), y).backward()
        adam.step()
    assert losses[-1] < 0.5 * nn.MSELoss()(other(x), y).item()


def test_preconditioned_iterations_find_the_same_solution() -> None:
    net, x, y = problem(n=200)
    criterion = nn.MSELoss()
    optimizer = gn.HessianFree(net, criterion)
    criterion(net(x), y).backward()
    observations = optimizer._observer.take()
    g = optimizer._flat(dict(optimizer._gradient())).detach()
    product, blocks = optimizer._product(observations, 0.1), optimizer._blocks(observations)
    plain, other = (
        gn.exact.conjugate_gradients(product, g, preconditioner=p, tolerance=1e-12)
        for p in (None, optimizer._preconditioner(blocks, 0.1))
    )
    assert relative(other.solution, plain.solution) < 1e-8


def test_weight_decay_and_resume() -> None:
    net, x, y = problem()
    optimizer = gn.HessianFree(net, nn.MSELoss(), weight_decay=1e-3)
    fit(optimizer, x, y, 3)
    again = copy.deepcopy(net)
    resumed = gn.HessianFree(again, nn.MSELoss(), weight_decay=1e-3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fit(optimizer, x, y, 3)
    fit(resumed, x, y, 3)
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
