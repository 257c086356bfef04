"""Memory stays within what was asked for, and the results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gaussnewton as gn
from gaussnewton.network import Network
from gaussnewton.observer import Observer
from gaussnewton.tangents import push
from tests.problems import relative

SMALL, LARGE = 512 * 2**10, 64 * 2**20
DATA = 128


def peak_bytes(run: Callable[[], Any]) -> tuple[int, Any]:
    """The most that tensors take at once beyond what they took before, and what was returned."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = run()
    taken = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            taken += event.nbytes()
            most = max(most, taken)
    return most, result


def problem() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Patches of 15 MiB in the first layer and 4 MiB in the second; 29 vectors of 1 MiB each."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 7, stride=2, padding=3),
        nn.Tanh(),
        nn.Conv2d(8, 8, 5, padding=2),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 30),
    )
    return model, (torch.randn(DATA, 4, 24, 24), torch.randint(30, (DATA,)))


def record() -> gn.tape.Record:
    model, (x, y) = problem()
    criterion = nn.CrossEntropyLoss()
    with gn.Tape(model, criterion) as tape:
        criterion(model(x), y)
    return tape.record


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("method", [gn.KFLR, gn.KFAC])
def test_curvature_keeps_to_its_workspace(method, sharing) -> None:
    seen = record()
    one_vector = 4 * sum(call.shape.numel() for call in seen.calls)
    little, small = peak_bytes(lambda: method(workspace=SMALL, sharing=sharing)(seen))
    much, large = peak_bytes(lambda: method(workspace=LARGE, sharing=sharing)(seen))
    results = sum(block.Q.numel() + block.G.numel() for block in small.values()) * 4
    for name, block in small.items():
        assert relative(block.Q, large[name].Q) < 1e-5
        assert relative(block.G, large[name].G) < 1e-5
    # Less than one vector at all layers is not to be had, as it is and in work.
    assert little < 3 * one_vector + SMALL + 3 * results
    assert much > 2 * little


def test_jacobian_products_keep_to_their_workspace() -> None:
    model, (x, y) = problem()
    criterion = nn.CrossEntropyLoss()
    observer = Observer(model, criterion)
    criterion(model(x), y).backward()
    (observation,) = observer.take()
    network = observation.passage
    assert isinstance(network, Network)
    directions = [{g.name: torch.randn(g.rows, g.columns)} for g in observer.theta]
    push(network.repeat, directions, slice(None))  # the first is compared with two backward passes
    little, small = peak_bytes(lambda: push(network.repeat, directions, slice(None), SMALL))
    much, large = peak_bytes(lambda: push(network.repeat, directions, slice(None), LARGE))
    assert relative(small, large) < 1e-5
    assert little < 2 * SMALL + 4 * large.numel() * 3
    assert much > 4 * little
