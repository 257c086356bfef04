"""How much of a step is taken, by what batches and averaged parameters say of noise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gaussnewton as gn
from gaussnewton.progress import Progress
from gaussnewton.share import POWER, SHORTEST, TOLERATED, share_of_step, temper
from tests.problems import fit, network


@pytest.mark.parametrize("anneal", [False, True])
def test_all_of_a_clear_step_is_taken_after_the_start(anneal: bool) -> None:
    settings = gn.Damping(anneal=anneal)

    def share(t: int, surprise: float, noise: float = 0.0) -> float:
        progress = Progress(t=t, surprise=surprise, noise=noise)
        return share_of_step(0.4, 10, progress, settings)

    assert share(5, math.inf) == share(50, math.inf) == share(50, 0.3) == 0.4
    assert share(10, 0.0) == pytest.approx(0.8 if anneal else 0.4)
    assert share(11, 0.0) == pytest.approx(1.0 if anneal else 0.4)
    assert share(11, math.inf, noise=-0.05) == pytest.approx(0.7 if anneal else 0.4)
    # The average reaches back four times as far, and lags behind in any case.
    assert share(200, math.inf, noise=-0.05) == pytest.approx(0.475 if anneal else 0.4)


def test_a_timid_step_is_a_part_of_what_would_be_taken() -> None:
    bold, timid = (Progress(t=50, surprise=0.1, boldness=b) for b in (1.0, 0.25))
    shares = [share_of_step(0.4, 10, progress, gn.Damping()) for progress in (bold, timid)]
    assert shares[1] == pytest.approx(0.25 * shares[0])


def tempered(noise: float, first: int, last: int, settings: gn.Damping, start: float) -> float:
    """As the optimiser does it: at every look at the averaged parameters."""
    progress = Progress(noise=noise, boldness=start)
    for t in range(first, last):
        progress.t = t
        if t % settings.interval(t) == 0:
            temper(progress, settings)
    return progress.boldness


@pytest.mark.parametrize("growth", [0.0, 0.1], ids=["every fifth", "rarer"])
@pytest.mark.parametrize("excess", [-1.0, -0.5, 0.0, 0.5, 1.0])
def test_steps_grow_and_shrink_as_a_power_of_the_updates(excess: float, growth: float) -> None:
    settings = gn.Damping(growth=growth)
    found = tempered(TOLERATED * (1 + excess), 1000, 2000, settings, start=0.3)
    assert found == pytest.approx(0.3 * 2 ** (-POWER * excess), rel=0.02)


def test_far_more_noise_counts_for_no_more() -> None:
    settings = gn.Damping()
    found = [tempered(share, 1000, 1500, settings, start=1.0) for share in (2 * TOLERATED, 0.9)]
    assert found[0] == pytest.approx(found[1])


def test_steps_are_never_longer_than_all_or_shorter_than_a_tenth() -> None:
    assert tempered(-1.0, 100, 5000, gn.Damping(), start=0.5) == 1.0
    assert tempered(1.0, 100, 5000, gn.Damping(), start=0.5) == SHORTEST
    assert tempered(1.0, 1, 100, gn.Damping(), start=1.0) == 1.0  # not at the start


def trained(batch: int, anneal: bool = True) -> dict:
    """Of a target that is mostly noise, in batches of some size."""
    x = torch.randn(640, 4)
    y = x[:, :1].tanh() + torch.randn(640, 1)
    optimizer = gn.GaussNewton(
        network([4, 16, 1]).float(), nn.MSELoss(), damping=gn.Damping(anneal=anneal)
    )
    order = torch.Generator().manual_seed(0)
    for _ in range(300):
        part = torch.randperm(640, generator=order)[:batch] if batch < 640 else slice(None)
        fit(optimizer, x[part], y[part], 1)
    return optimizer.diagnostics


def test_small_batches_make_steps_shorter_and_full_ones_do_not() -> None:
    assert trained(16)["boldness"] < 0.7
    assert trained(640)["boldness"] == 1.0
    assert trained(16, anneal=False)["boldness"] == 1.0


def test_a_run_saved_before_steps_were_tempered_goes_on() -> None:
    model = network([4, 16, 1])
    optimizer = gn.GaussNewton(model, nn.MSELoss())
    x = torch.randn(20, 4).double()
    fit(optimizer, x, x[:, :1], 2)
    state = optimizer.state_dict()
    del state["param_groups"][0]["progress"]["boldness"]
    optimizer.load_state_dict(state)
    fit(optimizer, x, x[:, :1], 1)
    assert optimizer.diagnostics["boldness"] == 1.0
