"""A small demonstration on generated data: curvature in a hand-written training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor, nn

from gaussnewton.diagnostics import verify
from gaussnewton.estimate import curvature

Batch = tuple[Tensor, Tensor]


def demo(updates: int = 60, seed: int = 0) -> dict[str, list[float]]:
    """Train a small network three ways on two interleaved spirals, then check its curvature.

    Prints a table of losses and the table of :func:`~gaussnewton.verify`.

    Returns:
        The loss before each update and after the last, for each way.

    Example:
        >>> import contextlib, io, gaussnewton.demo
        >>> with contextlib.redirect_stdout(io.StringIO()):
        ...     losses = gaussnewton.demo.demo(updates=2)
        >>> {name: len(history) for name, history in losses.items()}
        {'Adam 1e-2': 3, 'momentum 0.1': 3, 'Gauss-Newton (KFLR)': 3}
    """
    torch.manual_seed(seed)
    batch = two_spirals(500)
    start = nn.Sequential(
        nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    )
    ways: dict[str, Callable[[nn.Module, nn.Module, Batch, int], list[float]]] = {
        "Adam 1e-2": _adam,
        "momentum 0.1": _momentum,
        "Gauss-Newton (KFLR)": _gauss_newton,
    }
    print(
        f"Two interleaved spirals, 500 points, network 2-32-32-2 with tanh, {updates} updates on "
        "the whole batch.\nCross-entropy after some of them:\n"
    )
    criterion, losses, models = nn.CrossEntropyLoss(), {}, {}
    for name, train in ways.items():
        models[name] = copy.deepcopy(start)
        losses[name] = train(models[name], criterion, batch, updates)
    shown = sorted({0, updates // 6, updates // 3, 2 * updates // 3, updates})
    rows = [[name, *(f"{history[i]:.4f}" for i in shown)] for name, history in losses.items()]
    print(tabulate(rows, ["", *(f"update {i}" for i in shown)], disable_numparse=True))
    print("\nThe curvature blocks of the network trained last, beside the exact ones:\n")
    verify(models["Gauss-Newton (KFLR)"], criterion, batch)
    return losses


def two_spirals(count: int) -> Batch:
    """Points on two spirals wound around each other, and which of the two each is on."""
    label = torch.arange(count) % 2
    angle = 3 * torch.pi * torch.rand(count).sqrt()
    radius = angle / (3 * torch.pi)
    turn = angle + torch.pi * label
    points = torch.stack([radius * turn.cos(), radius * turn.sin()], dim=1)
    return 2 * points + 0.02 * torch.randn(count, 2), label


def _gauss_newton(
    model: nn.Module, criterion: nn.Module, batch: Batch, updates: int
) -> list[float]:
    """Damped block Gauss-Newton steps; the damping follows whether the loss fell.

    This is the method by hand, without the step size and damping rules of the paper.
    """
    x, y = batch
    parameters, damping, history = dict(model.named_parameters()), 1e-2, []
    for _ in range(updates):
        loss = criterion(model(x), y)
        gradient = dict(
            zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)
        )
        history.append(loss.item())
        blocks = curvature(model, criterion, batch, method="kflr")
        with torch.no_grad():
            while damping < 1e6:
                step = blocks.solve(gradient, damping)
                _move(parameters, step, -1.0)
                if criterion(model(x), y) < loss:
                    damping = max(damping / 2, 1e-7)
                    break
                _move(parameters, step, 1.0)
                damping *= 3
    history.append(criterion(model(x), y).item())
    return history


def _move(parameters: dict[str, nn.Parameter], step: dict[str, Tensor], sign: float) -> None:
    for name, parameter in parameters.items():
        parameter.add_(step[name], alpha=sign)


def _adam(model: nn.Module, criterion: nn.Module, batch: Batch, updates: int) -> list[float]:
    return _first_order(
        torch.optim.Adam(model.parameters(), lr=1e-2), model, criterion, batch, updates
    )


def _momentum(model: nn.Module, criterion: nn.Module, batch: Batch, updates: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return _first_order(optimizer, model, criterion, batch, updates)


def _first_order(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    criterion: nn.Module,
    batch: Batch,
    updates: int,
) -> list[float]:
    x, y = batch
    history = []
    for _ in range(updates):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    history.append(criterion(model(x), y).item())
    return history
