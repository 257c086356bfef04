"""The optimiser with layers that are wider than its limit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gaussnewton as gn
from gaussnewton.estimators import choose
from gaussnewton.passage import passage_of
from tests.problems import network


def trained(
    steps: int, largest: int | None, curvature: str | gn.Estimator = "kfra"
) -> tuple[nn.Module, gn.GaussNewton, list[float]]:
    model, criterion = network((6, 9, 8, 3), dtype=torch.float32), nn.MSELoss()
    optimizer = gn.GaussNewton(model, criterion, largest=largest, curvature=curvature)
    return model, optimizer, advance(model, optimizer, criterion, steps)


def advance(
    model: nn.Module, optimizer: gn.GaussNewton, criterion: nn.Module, steps: int
) -> list[float]:
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    y, losses = x[:, :3] * x[:, 3:], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("curvature", ["auto", "kflr", "kfra", "kfac"])
@pytest.mark.parametrize("largest", [1, 4])
def test_wide_layers_are_trained_in_tiles(largest: int, curvature: str) -> None:
    _, optimizer, losses = trained(30, largest, curvature)
    assert losses[-1] < 0.2 * losses[0]
    table = optimizer.explain()
    assert f"G {min(largest, 3)} and Q {largest} wide" in table  # the middle layer, 8 by 10


def test_a_limit_that_nothing_exceeds_changes_no_bit() -> None:
    assert trained(8, 10)[2] == trained(8, None)[2]
    assert trained(8, 4)[2] != trained(8, None)[2]


def test_explain_foresees_tiles() -> None:
    model, criterion = network((6, 9, 8, 3)), nn.MSELoss()
    fresh = gn.GaussNewton(model, criterion, largest=4)
    _, optimizer, _ = trained(1, 4)
    kinds = [
        [line for line in o.explain().splitlines() if "layers." in line] for o in (fresh, optimizer)
    ]
    assert [line.split("wide")[0] for line in kinds[0]] == [
        line.split("wide")[0] for line in kinds[1]
    ]
    assert "tiles" not in gn.GaussNewton(model, criterion).explain()
    own = gn.GaussNewton(model, criterion, curvature=gn.KFAC(largest=3)).explain()
    assert "G 3 and Q 3 wide" in own


@pytest.mark.parametrize("curvature", ["kfra", gn.KFAC(seed=3)])
def test_a_saved_run_goes_on_bit_for_bit(curvature: str | gn.Estimator) -> None:
    straight = trained(12, 4, copy.deepcopy(curvature))[2]
    model, optimizer, losses = trained(6, 4, copy.deepcopy(curvature))
    again = network((6, 9, 8, 3), dtype=torch.float32, seed=5)
    criterion = nn.MSELoss()
    resumed = gn.GaussNewton(again, criterion, largest=4, curvature=copy.deepcopy(curvature))
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    assert losses + advance(again, resumed, criterion, 6) == straight


@pytest.mark.parametrize("limits", [(4, None), (None, 4), (4, 3)])
def test_a_run_may_go_on_with_another_limit(limits: tuple[int | None, int | None]) -> None:
    model, optimizer, losses = trained(10, limits[0])
    criterion = nn.MSELoss()
    again = copy.deepcopy(model)
    resumed = gn.GaussNewton(again, criterion, largest=limits[1], curvature="kfra")
    resumed.load_state_dict(optimizer.state_dict())
    assert advance(again, resumed, criterion, 10)[-1] < losses[-1]


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="largest is at least 1"):
        gn.GaussNewton(nn.Linear(2, 1), nn.MSELoss(), largest=0)


def test_the_cheaper_estimator_is_chosen_with_the_limit_in_mind() -> None:
    """A wide layer in small tiles is dear for KFLR's vectors, and cheap for KFRA's matrix."""
    model, criterion = network((30, 200, 200, 3), dtype=torch.float32), nn.MSELoss()
    with gn.Tape(model, criterion) as tape:
        criterion(model(torch.randn(5, 30)), torch.randn(5, 3))
    passage = passage_of(tape.record)
    assert isinstance(choose(passage).estimator, gn.KFLR)
    assert isinstance(choose(passage, 4).estimator, gn.KFRA)
