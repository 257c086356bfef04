"""How much of a step is taken, by what batches and averaged parameters say of noise."""

from __future__ import annotations

import copy
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
    # Four times as many updates as count for settled: the lag counts for a fourth.
    assert share(400, math.inf, noise=-0.05) == pytest.approx(0.475 if anneal else 0.4)


@pytest.mark.parametrize(
    ("anneal", "surprise", "expected"),
    [
        (True, math.inf, 0.1),  # a fourth of the share
        (True, 0.1, 0.55),  # half-way from there to all of the step
        (True, 0.0, 1.0),  # batches are alike now, whatever they were
        (False, 0.0, 0.4),  # a state that was saved with ``anneal``
    ],
)
def test_noise_takes_off_what_is_noisy_of_a_step(
    anneal: bool, surprise: float, expected: float
) -> None:
    progress = Progress(t=500, surprise=surprise, boldness=0.25)
    found = share_of_step(0.4, 10, progress, gn.Damping(anneal=anneal))
    assert found == pytest.approx(expected)


def tempered(noise: float, marks: range, start: float) -> float:
    """Looks at the averaged parameters at some updates."""
    progress = Progress(noise=noise, boldness=start)
    for t in marks:
        progress.t = t
        temper(marks.step, progress)
    return progress.boldness


@pytest.mark.parametrize("interval", [5, 10, 20])
@pytest.mark.parametrize("excess", [-1.0, -0.5, 0.0, 0.5, 1.0])
def test_steps_grow_and_shrink_as_a_power_of_the_updates(excess: float, interval: int) -> None:
    found = tempered(TOLERATED * (1 + excess), range(1000, 2000, interval), start=0.3)
    assert found == pytest.approx(0.3 * 2 ** (-POWER * excess), rel=0.02)


def test_far_more_noise_counts_for_no_more() -> None:
    found = [tempered(noise, range(1000, 1500, 5), start=1.0) for noise in (2 * TOLERATED, 0.9)]
    assert found[0] == pytest.approx(found[1])


def test_steps_are_never_longer_than_all_or_shorter_than_a_tenth() -> None:
    assert tempered(-1.0, range(100, 5000, 15), start=0.5) == 1.0
    assert tempered(1.0, range(100, 5000, 15), start=0.5) == SHORTEST
    assert tempered(1.0, range(1, 100), start=1.0) == 1.0  # not at the start


@pytest.mark.parametrize("interval", [5, 20])
def test_updates_between_two_looks_are_counted_as_they_are(
    monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    """While intervals grow, looks are nearer to each other than the interval of each says."""
    counted = []
    monkeypatch.setattr("gaussnewton.guarding.temper", lambda passed, _: counted.append(passed))
    x = torch.randn(8, 4).double()
    damping = gn.Damping(tau=1.0, tau_interval=interval, growth=0.2)
    optimizer = gn.GaussNewton(network([4, 3, 1]), nn.MSELoss(), damping=damping)
    fit(optimizer, x, x[:, :1], 160)
    looks = [t for t in range(1, 161) if t % damping.interval(t) == 0]
    assert sum(counted) == looks[-1]
    assert sum(damping.interval(t) for t in looks) > looks[-1]


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
    state = copy.deepcopy(optimizer.state_dict())
    for name in ("boldness", "judged"):
        del state["param_groups"][0]["progress"][name]
    optimizer.load_state_dict(state)
    fit(optimizer, x, x[:, :1], 1)
    assert optimizer.diagnostics["boldness"] == 1.0


def test_what_is_left_of_steps_is_saved_and_matters() -> None:
    x = torch.randn(60, 4).double()
    y = torch.randn(60, 1).double()
    weights = []
    for boldness in (1.0, 0.3, 0.3):
        torch.manual_seed(0)
        model = network([4, 6, 1])
        optimizer = gn.GaussNewton(model, nn.MSELoss())
        for part in torch.arange(60).split(20):
            fit(optimizer, x[part], y[part], 1)
        optimizer.param_groups[0]["progress"] |= {"boldness": boldness, "surprise": 1.0}
        other = copy.deepcopy(model)
        resumed = gn.GaussNewton(other, nn.MSELoss())
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each in (optimizer, resumed):
            fit(each, x[:20], y[:20], 2)
        assert torch.equal(model.layers[0].weight, other.layers[0].weight)
        weights.append(model.layers[0].weight.detach().clone())
    assert torch.equal(weights[1], weights[2])
    assert not torch.allclose(weights[0], weights[1])
