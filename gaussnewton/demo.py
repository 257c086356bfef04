"""A small demonstration on generated data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from tabulate import tabulate
from torch import Tensor, nn

from gaussnewton.diagnostics import verify
from gaussnewton.optimizer import GaussNewton
from gaussnewton.settings import PAPER

Batch = tuple[Tensor, Tensor]
Losses = list[float]


def demo(updates: int = 100, seed: int = 0) -> dict[str, Losses]:
    """Train a small autoencoder of generated curves in several ways, then check its curvature.

    Prints a table of losses and the table of :func:`~gaussnewton.verify`.

    Returns:
        The loss before each update and after the last, for each way.

    Example:
        >>> import contextlib, io, gaussnewton.demo
        >>> with contextlib.redirect_stdout(io.StringIO()):
        ...     losses = gaussnewton.demo.demo(updates=2)
        >>> [len(history) for history in losses.values()]
        [3, 3, 3, 3, 3]
    """
    torch.manual_seed(seed)
    images = curves(500, side=12)
    batch, criterion = (images, images), nn.BCEWithLogitsLoss()
    start = autoencoder([144, 64, 32, 8, 32, 64, 144])
    makers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        f"Adam {rate:g}": partial(_adam, rate=rate) for rate in (1e-3, 1e-2, 3e-2)
    }
    makers["gn.PAPER"] = lambda model: GaussNewton(model, criterion, **PAPER)
    makers["gn.GaussNewton"] = lambda model: GaussNewton(model, criterion)
    print(
        "500 generated images of curves, 12 x 12; autoencoder 144-64-32-8-32-64-144, tanh;\n"
        f"{updates} updates on the whole batch. Cross-entropy per pixel after some of them:\n"
    )
    losses, model = {}, start
    shown = sorted({0, updates // 10, updates // 5, updates // 2, updates})
    for name, make in makers.items():
        model = copy.deepcopy(start)
        losses[name] = train(model, criterion, make(model), batch, updates)
    rows = [[name, *(f"{history[i]:.4f}" for i in shown)] for name, history in losses.items()]
    print(tabulate(rows, ["update", *map(str, shown)], disable_numparse=True))
    print("\nThe curvature blocks of the network trained last, beside the exact ones:\n")
    verify(model, criterion, batch)
    return losses


def curves(count: int, side: int) -> Tensor:
    """Images of smooth curves that three random points bend, one image a row."""
    axis = torch.linspace(-1, 1, side)
    across, down = torch.meshgrid(axis, axis, indexing="ij")
    first, middle, last = (1.6 * torch.rand(3, count, 1, 2) - 0.8).unbind()
    s = torch.linspace(0, 1, 2 * side)[None, :, None]
    points = (1 - s) ** 2 * first + 2 * s * (1 - s) * middle + s**2 * last
    x, y = points[..., 0, None, None], points[..., 1, None, None]
    distance = ((across - x) ** 2 + (down - y) ** 2).amin(1)
    return torch.exp(-distance / 0.02).flatten(1)


def autoencoder(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers of these sizes with tanh between."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def train(
    model: nn.Module,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    updates: int,
) -> Losses:
    """An ordinary loop, the same for every optimiser."""
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


def _adam(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=rate)
