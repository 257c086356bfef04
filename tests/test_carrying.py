"""Steps that go on with the averaged parameters."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.averaging import carry_on, memory_at, without_last
from gaussnewton.carrying import MEMORY, note_fitted, note_followed, takes_blame, window
from gaussnewton.damping import adapt_tau, note_slope
from gaussnewton.progress import Progress
from tests.problems import fit, network


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("carried", [0.0, 0.3, 0.8])
def test_parameters_go_on_by_a_share_of_what_averages_moved_by(
    carried: float, dtype: torch.dtype
) -> None:
    """Against the two lines of the definition, over many updates."""
    steps = torch.randn(50, 3, 5, dtype=dtype)
    mean, theta = torch.zeros(3, 5, dtype=dtype), torch.zeros(3, 5, dtype=dtype)
    past, place = mean.clone(), theta.clone()
    for t, step in enumerate(steps, start=1):
        theta += step
        carry_on(mean, theta, t, 0.9, carried)
        beta = min(0.9, 1 - 1 / t)
        moved = place + step
        now = beta * past + (1 - beta) * moved
        place = moved + carried * (now - past) if t > 1 else moved
        past = now
        torch.testing.assert_close(mean, past)
        torch.testing.assert_close(theta, place)


@pytest.mark.parametrize("carried", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("t", [2, 7, 400])
def test_the_last_update_of_the_averages_can_be_undone(t: int, carried: float) -> None:
    before, theta = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    mean = before.clone()
    carry_on(mean, theta, t, 0.99, carried)
    found = without_last(mean, theta, t, 0.99, carried)
    assert found is not None
    torch.testing.assert_close(found, before)


@pytest.mark.parametrize("carried", [0.0, 0.5, 0.8])
def test_what_all_steps_have_in_common_goes_further(carried: float) -> None:
    """The same step again and again: 1 / (1 − μ) times as far with each, in the end."""
    mean, theta = torch.zeros(()).double(), torch.zeros(()).double()
    places = []
    for t in range(1, 1001):
        theta += 1.0
        carry_on(mean, theta, t, 0.9, carried)
        places.append((float(theta), float(mean)))
    for last, one_before in zip(places[-1], places[-2], strict=True):
        assert last - one_before == pytest.approx(1 / (1 - carried))


def test_swings_are_not_carried() -> None:
    """Steps to and fro, as along a direction of great curvature, are as long as without."""
    mean, theta = torch.zeros(()).double(), torch.zeros(()).double()
    places = []
    for t in range(1, 1001):
        theta += (-1.0) ** t
        carry_on(mean, theta, t, 0.98, 0.8)
        places.append(float(theta))
    assert abs(places[-1] - places[-2]) < 1.02


def test_averages_reach_back_less_far_where_more_is_carried() -> None:
    whole = memory_at(1000, 0.9, 0.1)
    assert window(whole, 0.0) == pytest.approx(0.99)
    updates = [1 / (1 - window(whole, carried)) for carried in (0.0, 0.4, 0.8)]
    assert updates == pytest.approx([100, 76, 52])
    assert window(0.0, 0.8) == 0.0


@pytest.mark.parametrize(
    ("t", "fitted", "expected"),
    [(99, 0.0, 0.0), (100, 0.0, 0.8), (100, 0.3, 0.8), (500, 0.5, 0.8 / 3), (500, 0.6, 0.0)],
)
def test_nothing_is_carried_at_the_start_or_where_batches_are_fitted(
    t: int, fitted: float, expected: float
) -> None:
    progress = Progress(t=t, fitted=fitted)
    note_followed(0.8, progress)
    assert progress.carried == pytest.approx(expected)


@pytest.mark.parametrize(
    ("t", "most", "expected"), [(69, 0.8, 0.0), (70, 0.8, 0.5), (200, 0.1, 0.5), (200, 0.0, 0.0)]
)
def test_averages_are_followed_before_anything_is_carried(
    t: int, most: float, expected: float
) -> None:
    progress = Progress(t=t, fitted=0.45)
    note_followed(most, progress)
    assert progress.followed == pytest.approx(expected)
    assert progress.carried == pytest.approx(most * expected if t == 200 else 0.0)


@pytest.mark.parametrize(
    ("noise", "surprise", "expected"),
    [
        (0.05, math.inf, 0.8),
        (0.075, math.inf, 0.4),  # averages save much: half-way to none
        (0.1, math.inf, 0.0),
        (-0.05, math.inf, 0.4),  # they lag behind
        (-0.1, math.inf, 0.0),
        (0.0, 0.1, 0.4),  # batches are nearly all the same
        (0.0, 0.0, 0.0),
    ],
)
def test_nothing_is_carried_where_averages_are_no_guide(
    noise: float, surprise: float, expected: float
) -> None:
    progress = Progress(t=100, fitted=0.1, noise=noise, surprise=surprise)
    note_followed(0.8, progress)
    assert progress.carried == pytest.approx(expected)


def test_an_update_fails_for_what_was_carried_only_now_and_then() -> None:
    progress, found = Progress(), []
    for t, carried in ((200, 0.0), (210, 0.05), (220, 0.5), (240, 0.5), (300, 0.5)):
        progress.t, progress.carried, progress.fitted, progress.slope = t, carried, 0.2, -0.1
        progress.followed = carried
        found.append(takes_blame(progress))
        assert progress.carried == progress.followed == progress.slope == 0
        assert progress.fitted == (1.0 if carried else 0.2)
    assert found == [False, False, True, False, True]


def test_what_steps_would_fit_is_a_running_mean_that_survives_odd_losses() -> None:
    progress = Progress()
    for _ in range(200):
        note_fitted(0.5, 2.0, progress)
    assert progress.fitted == pytest.approx(0.25, abs=1e-3)
    for whole, loss in ((3.0, 2.0), (1.0, 0.0), (1.0, -5.0), (-1e12, 2.0), (math.inf, 2.0)):
        before = progress.fitted
        note_fitted(whole, loss, progress)
        assert progress.fitted == pytest.approx(MEMORY * before + 1 - MEMORY)
    before = progress.fitted
    note_fitted(math.nan, 2.0, progress)
    assert progress.fitted == before


def regression(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    net = network([4, 8, 1], dtype=dtype)
    x = torch.randn(400, 4, dtype=dtype)
    return net, x, x[:, :1].tanh() * x[:, 1:2] + 0.5 * torch.randn(400, 1, dtype=dtype)


def ready(optimizer: gn.GaussNewton, fitted: float = 0.1) -> None:
    """As if there had been many updates of which each might have fitted a little."""
    optimizer.param_groups[0]["progress"] |= {"t": 200, "fitted": fitted, "surprise": 1.0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("lr", [0.0, 0.25, 1.0])
def test_an_update_is_its_step_and_what_is_carried(
    monkeypatch: pytest.MonkeyPatch, lr: float, dtype: torch.dtype
) -> None:
    net, x, y = regression(dtype)
    optimizer = gn.GaussNewton(net, nn.MSELoss(), lr=lr)
    fit(optimizer, x[:100], y[:100], 3)
    with torch.no_grad():  # averages somewhere else, so that there is something to carry
        for p in net.parameters():
            optimizer.state[p]["average"] += 0.01 * torch.randn_like(p)
    ready(optimizer)
    after_step = {}
    carry = optimizer._average

    def noting(observations: Any, progress: Progress) -> None:
        after_step.update({n: p.detach().clone() for n, p in net.named_parameters()})
        carry(observations, progress)

    monkeypatch.setattr(optimizer, "_average", noting)
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    past = optimizer.averaged_parameters()
    fit(optimizer, x[100:200], y[100:200], 1)
    now = optimizer.averaged_parameters()
    assert optimizer.diagnostics["carried"] == pytest.approx(0.7 * lr)
    for name, p in net.named_parameters():
        moved = p.detach() - after_step[name]
        torch.testing.assert_close(moved, 0.7 * lr * (now[name] - past[name]), rtol=1e-4, atol=1e-7)
        assert bool((moved != 0).any()) == bool(lr)
        assert torch.equal(p, start[name]) == (lr == 0)


def test_a_group_with_a_lower_rate_is_carried_less() -> None:
    net, x, y = regression()
    groups = [
        {"params": net.layers[0].parameters(), "lr": 0.8},
        {"params": net.layers[1].parameters(), "lr": 0.2},
    ]
    optimizer = gn.GaussNewton(net, nn.MSELoss(), groups)
    fit(optimizer, x[:100], y[:100], 3)
    ready(optimizer)
    fit(optimizer, x[100:200], y[100:200], 1)
    assert optimizer.diagnostics["carried"] == pytest.approx(0.7 * 0.8)
    progress = Progress(**optimizer.param_groups[0]["progress"])
    found = [optimizer._carried(layer.weight, progress) for layer in net.layers]
    assert found == pytest.approx([0.7 * 0.8, 0.7 * 0.2])
    net.layers[0].weight.requires_grad_(False)  # its gradient is still there
    assert optimizer._carried(net.layers[0].weight, progress) == 0


@pytest.mark.parametrize("carry", [0.0, 0.7])
def test_batches_that_become_all_the_same_are_recognised(carry: float) -> None:
    """Whatever is carried does not count as a difference between them, and nothing is any more."""
    net, x, y = regression()
    optimizer = gn.GaussNewton(net, nn.MSELoss(), step_size=gn.StepSize(carry=carry))
    fit(optimizer, x[:100], y[:100], 3)
    ready(optimizer)
    fit(optimizer, x, y, 1)
    assert (optimizer.diagnostics["carried"] > 0) == (carry > 0)
    fit(optimizer, x, y, 200)
    assert optimizer.diagnostics["surprise"] < 0.02
    assert optimizer.diagnostics["carried"] == pytest.approx(0, abs=0.05)


def test_steps_are_shorter_where_more_is_carried() -> None:
    alphas = []
    for carry in (0.0, 0.7):
        net, x, y = regression()
        optimizer = gn.GaussNewton(net, nn.MSELoss(), step_size=gn.StepSize(carry=carry))
        fit(optimizer, x[:100], y[:100], 3)
        ready(optimizer)
        fit(optimizer, x[100:200], y[100:200], 1)
        alphas.append(optimizer.diagnostics["alpha"])
    assert alphas[1] / alphas[0] == pytest.approx(math.sqrt(0.3))


def test_a_layer_that_had_no_part_in_a_pass_stays_where_it_is() -> None:
    net, x, y = regression()
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    fit(optimizer, x[:100], y[:100], 3)
    ready(optimizer)
    resting = list(net.layers[0].parameters())
    with torch.no_grad():
        for p in resting:
            optimizer.state[p]["average"].add_(0.01)
    kept = [p.detach().clone() for p in resting]
    optimizer.zero_grad()
    optimizer.criterion(net(x), y).backward()
    for p in resting:
        p.grad = None
    optimizer.step()
    assert optimizer.diagnostics["carried"] > 0
    assert all(torch.equal(p, place) for p, place in zip(resting, kept, strict=True))


def test_a_step_that_is_taken_back_takes_back_what_was_carried() -> None:
    net, x, y = regression()
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    fit(optimizer, x[:100], y[:100], 3)
    ready(optimizer)
    before = [p.detach().clone() for p in net.parameters()]
    past = optimizer.averaged_parameters()
    fit(optimizer, x[100:200], y[100:200], 1)
    assert optimizer.diagnostics["carried"] > 0
    memory = window(memory_at(201, 0.9, 0.1), 0.7)
    with torch.no_grad():  # as if the step had gone a thousand times as far
        for p, q in zip(net.parameters(), before, strict=True):
            average = optimizer.state[p]["average"]
            u = (p - average) / (memory + 0.7 * (1 - memory))
            step = average + memory * u - q
            p.add_(999 * step * (1 + 0.7 * (1 - memory)))
            average.add_(999 * step * (1 - memory))
    fit(optimizer, x[200:300], y[200:300], 1)
    assert optimizer.diagnostics["refused"] == 1
    assert optimizer.diagnostics["carried"] == 0
    for p, q in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, q)
    found = optimizer.averaged_parameters()
    beta = memory_at(202, 0.9, 0.1)
    for (name, average), q in zip(found.items(), before, strict=True):
        torch.testing.assert_close(average, beta * past[name] + (1 - beta) * q)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        (gn.PAPER, torch.float64),
        ({"step_size": gn.StepSize(momentum=True)}, torch.float64),
        ({"damping": gn.Damping(anneal=False)}, torch.float64),
        ({"refresh": gn.Refresh(average=0.0, last=0.0)}, torch.float64),
        ({}, torch.bfloat16),
    ],
)
def test_where_nothing_is_carried(settings: dict, dtype: torch.dtype) -> None:
    net, x, y = regression(dtype)
    optimizer = gn.GaussNewton(net, nn.MSELoss(), **settings)
    fit(optimizer, x, y, 3)
    ready(optimizer)
    fit(optimizer, x, y, 1)
    assert optimizer.diagnostics["carried"] == 0


@pytest.mark.parametrize("carry", [-0.1, 1.0])
def test_a_share_that_no_mean_has_is_refused(carry: float) -> None:
    with pytest.raises(ValueError, match=r"StepSize\(carry="):
        gn.StepSize(carry=carry)


@pytest.mark.parametrize(("batch", "carries"), [(200, True), (4, False)])
def test_small_batches_carry_nothing_and_large_ones_do(batch: int, carries: bool) -> None:
    net, x, y = regression()
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    order = torch.Generator().manual_seed(0)
    for _ in range(130):
        part = torch.randperm(400, generator=order)[:batch]
        fit(optimizer, x[part], y[part], 1)
    assert (optimizer.diagnostics["carried"] > 0) == carries


def test_it_is_saved_and_goes_on_bit_for_bit() -> None:
    net, x, y = regression()
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    fit(optimizer, x[:100], y[:100], 3)
    ready(optimizer, fitted=0.4)
    fit(optimizer, x[100:200], y[100:200], 2)
    other = copy.deepcopy(net)
    resumed = gn.GaussNewton(other, nn.MSELoss())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, resumed):
        fit(each, x[200:300], y[200:300], 3)
    assert 0 < optimizer.diagnostics["carried"] < 0.7
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_run_saved_before_anything_was_carried_goes_on() -> None:
    net, x, y = regression()
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    fit(optimizer, x, y, 2)
    state = copy.deepcopy(optimizer.state_dict())
    for name in ("carried", "fitted", "slope", "blamed"):
        del state["param_groups"][0]["progress"][name]
    optimizer.load_state_dict(state)
    optimizer.param_groups[0]["progress"] |= {"t": 200, "surprise": 1.0}
    fit(optimizer, x, y, 1)
    assert optimizer.diagnostics["carried"] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_slope_at_the_averages_is_that_of_the_loss(dtype: torch.dtype) -> None:
    """Of a loss that is quadratic in the parameters the parabola's slope is exact."""
    net = nn.Linear(4, 3, dtype=dtype)
    x, y = torch.randn(50, 4, dtype=dtype), torch.randn(50, 3, dtype=dtype)
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    fit(optimizer, x, y, 3)
    with torch.no_grad():
        for p in net.parameters():
            optimizer.state[p]["average"] += 0.3 * torch.randn_like(p)
    present = [p.detach().clone() for p in net.parameters()]
    criterion, model = nn.MSELoss(), copy.deepcopy(net)
    averages = optimizer.averaged_parameters()
    model.load_state_dict(averages)
    gradient = torch.autograd.grad(criterion(model(x), y), list(model.parameters()))
    expected = sum(
        float(((p - q) * g).sum().detach())
        for p, q, g in zip(present, averages.values(), gradient, strict=True)
    )
    optimizer.zero_grad()
    loss = criterion_loss(optimizer, net, x, y)
    observations = optimizer._observer.take()
    with optimizer.averaged(), torch.no_grad():
        averaged = float(optimizer._evaluate(observations))
    with torch.no_grad():
        found = optimizer._slope(observations, averaged, loss)
    assert found == pytest.approx(expected, rel=1e-9 if dtype == torch.float64 else 1e-3)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), present, strict=True))


@pytest.mark.parametrize(("t", "followed"), [(209, 1.0), (209, 0.1), (79, 1.0), (209, 0.0)])
def test_the_slope_is_looked_at_where_averages_are_followed(t: int, followed: float) -> None:
    net, x, y = regression()
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    fit(optimizer, x[:100], y[:100], 3)
    with torch.no_grad():
        for p in net.parameters():
            optimizer.state[p]["average"] += 0.01 * torch.randn_like(p)
    interval = gn.Damping().interval(t + 1)
    progress = {"t": t, "judged": t + 1 - interval, "followed": followed, "slope": 0.5}
    optimizer.param_groups[0]["progress"] |= progress
    last = optimizer.param_groups[0]["progress"]["last_predicted"]
    with optimizer.averaged():
        averages = copy.deepcopy(net)
    loss = nn.functional.mse_loss(averages(x), y)
    gradient = torch.autograd.grad(loss, list(averages.parameters()))
    pairs = zip(net.parameters(), averages.parameters(), gradient, strict=True)
    slope = sum(float(((p - q) * g).sum().detach()) for p, q, g in pairs)
    scale = float(nn.functional.mse_loss(net(x), y).detach()) + abs(last)
    fit(optimizer, x, y, 1)
    past = 0.7 ** (interval / 5)
    expected = past * 0.5 + (1 - past) * slope / scale if followed else 0.0
    found = optimizer.param_groups[0]["progress"]["slope"]
    assert found == pytest.approx(expected, rel=0.02)
    assert bool(found) == bool(followed)


def test_a_slope_that_is_no_number_is_not_noted() -> None:
    progress = Progress(slope=0.1)
    for slope in (math.nan, math.inf):
        note_slope(slope, 5, progress, gn.Damping())
    assert progress.slope == 0.1


def test_a_step_that_fails_on_its_own_batch_raises_damping_whatever_was_carried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, x, y = regression()
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    fit(optimizer, x[:100], y[:100], 3)
    ready(optimizer)
    optimizer.param_groups[0]["progress"]["look"] = True
    tau = optimizer.diagnostics["tau"]
    evaluate = optimizer._evaluate
    monkeypatch.setattr(optimizer, "_evaluate", lambda seen: evaluate(seen) + 10)
    fit(optimizer, x[100:200], y[100:200], 1)
    assert optimizer.diagnostics["refused"] == 1
    assert optimizer.diagnostics["tau"] > tau
    assert optimizer.diagnostics["carried"] == 0


def criterion_loss(optimizer: gn.GaussNewton, net: nn.Module, x: Tensor, y: Tensor) -> float:
    """One pass that the optimiser sees, with its gradients."""
    assert optimizer.criterion is not None
    loss = optimizer.criterion(net(x), y)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize(
    ("followed", "noise", "slope", "falls"),
    [
        (0.0, -0.01, 0.0, True),  # averages lag behind
        (0.4, -0.01, 0.0, True),
        (0.4, 0.01, -0.05, False),  # small batches' slope says nothing
        (0.7, 0.01, -0.05, True),  # they would
        (0.7, -0.01, 0.0, False),
    ],
)
def test_damping_falls_where_steps_lead_somewhere(
    followed: float, noise: float, slope: float, falls: bool
) -> None:
    progress = Progress(t=200, tau=1.0, gamma=1.0, first_tau=1.0, surprise=1.0)
    progress.followed, progress.noise, progress.slope = followed, noise, slope
    adapt_tau(1.0, 0.01, progress, gn.Damping())
    assert (progress.tau < 1.0) == falls
    assert progress.tau <= 1.0


@pytest.mark.parametrize(
    ("followed", "slope", "times"),
    [(0.7, -0.0249, 1.0), (0.7, -0.0375, 1.5**3), (0.7, -0.5, 6.0), (0.4, -0.0375, 1.0)],
)
def test_damping_falls_faster_the_steeper_it_is(
    followed: float, slope: float, times: float
) -> None:
    """ω_τ to a power; and no faster where batches are too small to tell."""
    progress = Progress(t=200, tau=1.0, gamma=1.0, first_tau=1.0, surprise=1.0, noise=-0.01)
    progress.followed, progress.slope = followed, slope
    adapt_tau(1.0, 0.01, progress, gn.Damping())
    assert progress.tau == pytest.approx(0.95 ** (15 * times))


def test_damping_rises_as_slowly_as_ever() -> None:
    progress = Progress(t=200, tau=1.0, gamma=1.0, first_tau=1.0, carried=0.7, slope=-0.5)
    adapt_tau(0.1, 0.01, progress, gn.Damping())
    assert progress.tau == pytest.approx(0.95**-15)


def test_an_update_that_failed_is_blamed_on_what_was_carried() -> None:
    """τ stays, and nothing is carried for a while; without it τ rises."""
    taus = {}
    for carry in (0.0, 0.7):
        net, x, y = regression()
        optimizer = gn.GaussNewton(net, nn.MSELoss(), step_size=gn.StepSize(carry=carry))
        fit(optimizer, x[:100], y[:100], 3)
        ready(optimizer)
        fit(optimizer, x[100:200], y[100:200], 1)
        before = optimizer.diagnostics["tau"]
        with torch.no_grad():
            for p in net.parameters():
                p.add_(p - optimizer.state[p]["start"], alpha=1e3)
        fit(optimizer, x[200:300], y[200:300], 1)
        assert optimizer.diagnostics["refused"] == 1
        taus[carry] = optimizer.diagnostics["tau"] / before
        fit(optimizer, x[200:300], y[200:300], 2)
        assert optimizer.diagnostics["carried"] == 0
    assert taus[0.0] > 1
    assert taus[0.7] == 1
