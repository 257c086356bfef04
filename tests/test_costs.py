"""What an update of the optimiser leaves out, and what it lets go of."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton import curved as module
from gaussnewton import damping as rules
from gaussnewton.blocks.kronecker import FactoredInverse, MultipliedInverse
from gaussnewton.estimators import KFRA
from gaussnewton.gradients import Gradient
from gaussnewton.passage import passage_of
from gaussnewton.progress import Progress
from tests.problems import fit, network, relative


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only what nobody refers to goes away."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def problem(n: int = 40) -> tuple[nn.Module, Tensor, Tensor]:
    net = network([5, 6, 4, 3])
    x = torch.randn(n, 5).double()
    return net, x, torch.stack([x[:, i] * x[:, i + 1] for i in range(3)], 1)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("curvature", ["kfra", "kflr", "kfac"])
@pytest.mark.parametrize("targets", ["one", "several"])
def test_what_was_recorded_goes_with_the_step(curvature: str, targets: str) -> None:
    net, x, y = problem()
    criterion: nn.Module = nn.MSELoss()
    if targets == "several":
        criterion = gn.Loss(lambda out, y, w: (w * (out - y).square().sum(1)).mean())
    optimizer = gn.GaussNewton(net, criterion, curvature=curvature)
    seen: list[weakref.ref[Tensor]] = []
    net.layers[1].register_forward_hook(lambda _, args, __: seen.extend(map(weakref.ref, args)))
    for _ in range(6):
        optimizer.zero_grad()
        given = (y,) if targets == "one" else (y, torch.ones(len(y)).double())
        criterion(net(x), *given).backward()
        optimizer.step()
    assert len(seen) >= 6
    assert not any(part() is not None for part in seen)


def test_running_tensors_stay_where_they_are() -> None:
    """They are changed in place: there is no moment with two of them."""
    net, x, y = problem()
    optimizer = gn.GaussNewton(net, nn.MSELoss(), curvature="kfra")
    fit(optimizer, x, y, 2)
    state = optimizer.state[net.layers[0].weight]
    places = {key: state[key].data_ptr() for key in ("Q", "G", "gradient", "start", "average")}
    fit(optimizer, x, y, 8)
    assert {key: state[key].data_ptr() for key in places} == places


@pytest.mark.parametrize("make", [gn.KroneckerBlock, gn.TiledBlock])
def test_absorbing_a_block_is_averaging_it(make: type) -> None:
    def block() -> gn.KroneckerBlock:
        Q, G = torch.randn(6, 6).double(), torch.randn(4, 4).double()
        if make is gn.TiledBlock:
            return gn.TiledBlock(torch.randn(6, 3).double(), torch.randn(4, 2).double())
        return gn.KroneckerBlock(Q @ Q.T, G @ G.T)

    one, other = block(), block()
    expected = one.average(other, 0.8)
    found = one.absorb(other, 0.8)
    assert found is one
    torch.testing.assert_close(found.Q, expected.Q)
    torch.testing.assert_close(found.G, expected.G)


def test_kfra_finds_its_blocks_one_by_one() -> None:
    """From the last layer to the first; no block is held for longer than its turn."""
    net, x, y = problem()
    with gn.Tape(net, criterion := nn.MSELoss()) as tape:
        criterion(net(x), y)
    passage = passage_of(tape.record)
    names, last = [], None
    for name, block in KFRA().each(passage):
        assert last is None or last() is None
        names.append(name)
        last = weakref.ref(block)
        del block
    assert names == ["layers.2", "layers.1", "layers.0"]
    assert list(KFRA().of(passage)) == names[::-1]


def test_gradient_is_written_when_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = problem()
    nn.MSELoss()(net(x), y).backward()
    net.layers[1].bias.grad = None
    theta = gn.Theta(net)
    gradient = Gradient(theta, lambda p: 0.5 if p is net.layers[0].weight else 0.0)
    assert list(gradient) == ["layers.0", "layers.1", "layers.2"]
    assert len(gradient) == 3
    first = net.layers[0]
    torch.testing.assert_close(
        gradient["layers.0"],
        torch.cat([first.weight.grad + 0.5 * first.weight, first.bias.grad[:, None]], 1).detach(),
    )
    assert not gradient["layers.1"][:, -1].any()
    assert list(gradient.parts(theta["layers.1"])) == ["layers.1.weight"]
    monkeypatch.setattr(Gradient, "__getitem__", None)  # to ask for a name writes nothing
    assert "layers.2" in gradient
    assert "layers.3" not in gradient
    assert bool(gradient.finite())
    net.layers[2].weight.grad[0, 0] = float("inf")
    assert not bool(gradient.finite())


def test_estimates_grow_rarer_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = problem()
    refresh = gn.Refresh(early=2, curvature=2, growth=0.5)
    optimizer = gn.GaussNewton(net, nn.MSELoss(), curvature="kfra", refresh=refresh)
    estimated = []
    before = module.blocks_of

    def noted(*arguments: object) -> object:
        estimated.append(optimizer.param_groups[0]["progress"]["t"] + 1)
        return before(*arguments)

    monkeypatch.setattr(module, "blocks_of", noted)
    fit(optimizer, x, y, 30)
    assert estimated == [1, 2, 4, 7, 13, 25]
    assert [refresh.interval(t) for t in (1, 2, 3, 10, 1000)] == [1, 1, 2, 5, 20]


def test_estimates_age_with_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out: Q of estimates that grow rarer, each kept for as many updates."""
    net, x, y = problem()
    refresh = gn.Refresh(early=2, curvature=2, growth=0.5, decay=0.8, longest=0.0)
    optimizer = gn.GaussNewton(net, nn.MSELoss(), curvature="kfra", refresh=refresh)
    estimates: list[dict[str, Tensor]] = []
    before = module.blocks_of

    def noted(*arguments: Any) -> Any:
        found = list(before(*arguments))
        estimates.append({name: block.Q.clone() for name, block in found})
        return found

    monkeypatch.setattr(module, "blocks_of", noted)
    fit(optimizer, x, y, 25)
    weights = [0.8, 0.8, 0.8, 0.8**1.5, 0.8**3, 0.8**6]  # intervals of 1, 1, 2, 3, 6, 12 updates
    for name, block in optimizer._blocks().items():
        Q = torch.zeros_like(block.Q)
        for count, (estimate, memory) in enumerate(zip(estimates, weights, strict=True), 1):
            kept = min(memory, 1 - 1 / count)
            Q = kept * Q + (1 - kept) * estimate[name]
        torch.testing.assert_close(block.Q, Q)


@pytest.mark.parametrize(
    ("t", "wanted", "memory"),
    [
        (50, 0.0, 0.8),
        (400, 0.0, 0.8**4),
        (400, 1.0, 0.8**4),
        (400, 5.0, 4 / 6),
        (400, 50.0, 0.8**0.25),
    ],
)
def test_few_data_are_remembered_for_longer(t: int, wanted: float, memory: float) -> None:
    """With 5 batches wanted the running mean has those of (1 + 4/6) / (1 − 4/6) = 5."""
    assert gn.Refresh().memory(t, wanted) == pytest.approx(memory)
    assert gn.Refresh(decay=0.0).memory(t, wanted) == 0.0  # the latest only, whatever it says
    assert gn.Refresh(longest=0.0).memory(t, wanted) == gn.Refresh().memory(t)


@pytest.mark.parametrize(("spread", "memory"), [(0.0, 0.8), (1.0, 15 / 17)])
def test_curvature_that_differs_between_batches_is_remembered_for_longer(
    spread: float, memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 batches whose logarithms are off by 1 have a mean that is off by a quarter."""
    net, (x, y) = network([4, 5, 3]), (torch.randn(30, 4).double(), torch.randn(30, 3).double())
    optimizer = gn.GaussNewton(net, nn.MSELoss(), refresh=gn.Refresh(curvature=2, growth=0.0))
    fit(optimizer, x, y, 3)
    optimizer.param_groups[0]["progress"]["spread"] = spread
    kept = []
    monkeypatch.setattr("gaussnewton.curved.store", lambda *arguments: kept.append(arguments[-1]))
    fit(optimizer, x, y, 1)
    assert kept == pytest.approx([memory] * 2)


@pytest.mark.parametrize("data", [2, 200])
def test_the_optimiser_knows_whether_data_are_few(
    data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.Linear(60, 2)).double()
    x, y = torch.randn(data, 60).double(), torch.randn(data, 2).double()
    seen: list[float] = []
    before = module.store
    monkeypatch.setattr(module, "store", lambda *a: (seen.append(a[3]), before(*a)))
    refresh = gn.Refresh(early=1, curvature=1, growth=0.5)
    fit(gn.GaussNewton(net, nn.MSELoss(), refresh=refresh), x, y, 30)
    wanted = 61 / (1.5 * 2)
    assert seen[-1] == pytest.approx((wanted - 1) / (wanted + 1) if data == 2 else 0.8**10)


def test_nothing_is_inverted_where_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = problem()
    optimizer = gn.GaussNewton(
        net,
        nn.MSELoss(),
        damping=gn.Damping(tau=1e-3, tau_interval=1000),
        refresh=gn.Refresh(early=1, curvature=100, inverse=2),
    )
    fit(optimizer, x, y, 1)
    inverted = []
    before = module.careful_inverse

    def noted(name: str, *arguments: object) -> object:
        inverted.append(name)
        return before(name, *arguments)

    monkeypatch.setattr(module, "careful_inverse", noted)
    fit(optimizer, x, y, 6)
    assert inverted == []
    optimizer.param_groups[0]["progress"]["gamma"] = 1.3e-3
    fit(optimizer, x, y, 4)
    assert inverted == []
    optimizer.param_groups[0]["progress"]["gamma"] = 2e-3
    fit(optimizer, x, y, 2)
    assert inverted == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("curvature", [1, 5])
def test_inverses_are_written_out_where_they_serve_for_several_updates(curvature: int) -> None:
    net, x, y = problem()
    optimizer = gn.GaussNewton(
        net, nn.MSELoss(), refresh=gn.Refresh(early=4, curvature=curvature, growth=0.0)
    )
    kinds = []
    for _ in range(8):
        fit(optimizer, x, y, 1)
        kinds.append({type(inverse) for inverse in optimizer._inverses.values()})
    later = FactoredInverse if curvature == 1 else MultipliedInverse
    assert kinds == [{FactoredInverse}] * 3 + [{later}] * 5


def test_most_of_a_step_is_taken_where_batches_are_alike() -> None:
    """The same batch again and again, and batches that have nothing in common."""
    surprises = {}
    for alike in (True, False):
        net, x, y = problem(n=240)
        optimizer = gn.GaussNewton(net, nn.MSELoss())
        noise = torch.randn(240, 3).double()
        for part in torch.arange(240).split(20):
            fit(optimizer, *((x[:20], y[:20]) if alike else (x[part], noise[part])), 1)
        surprises[alike] = optimizer.diagnostics["surprise"]
    assert surprises[True] < 1e-6
    assert surprises[False] > 0.2


def test_noise_is_forgotten_as_fast_however_rarely_it_is_looked_at() -> None:
    often, rarely = gn.Damping(growth=0.0), gn.Damping(growth=1.0)
    assert (often.interval(60), rarely.interval(60)) == (5, 15)
    found = []
    for settings, looks in ((often, 3), (rarely, 1)):
        progress = Progress(t=60, noise=-0.2)
        for _ in range(looks):
            assert not rules.note_noise(0.1, settings.interval(60), progress, settings)
        found.append(progress.noise)
    assert found[0] == pytest.approx(found[1])
    assert found[0] == pytest.approx(0.1 - 0.3 * 0.7**3)


def test_averages_reach_back_over_the_last_updates() -> None:
    net, x, y = problem()
    refresh = gn.Refresh(average=0.5, last=0.5)
    optimizer = gn.GaussNewton(net, nn.MSELoss(), refresh=refresh)
    mean = None
    for t in range(1, 15):
        fit(optimizer, x, y, 1)
        now = net.layers[0].weight.detach().clone()
        beta = min(max(0.5, 1 - 2 / t), 1 - 1 / t)
        mean = now if mean is None else beta * mean + (1 - beta) * now
    found = optimizer.averaged_parameters()["layers.0.weight"]
    assert relative(found, mean) < 1e-12


@pytest.mark.parametrize(
    ("rho", "noise", "surprise", "damped", "anneal", "change"),
    [
        (0.9, -0.01, 1.0, 0.1, True, 0.95**5),  # the averaged parameters lag behind
        (0.9, 0.0, 1.0, 0.1, True, 1.0),  # steps lead nowhere, however good the model is
        (0.9, 0.0, 1.0, 0.9, True, 0.95**5),  # but where they do because of the damping
        (0.9, 0.0, 0.1, 0.1, True, 0.95**5),  # batches are alike: there is no noise
        (0.9, 0.01, 0.1, 0.1, True, 1.0),
        (0.9, 0.0, math.inf, 0.1, False, 0.95**5),  # nothing is known of noise
        (0.5, -0.01, 1.0, 0.1, True, 1.0),
        (0.1, -0.01, 1.0, 0.1, True, 0.95**-5),
        (0.9, 0.2, 1.0, 0.9, True, 0.95**-5),
    ],
)
def test_when_tau_falls_and_rises(
    rho: float, noise: float, surprise: float, damped: float, anneal: bool, change: float
) -> None:
    progress = Progress(t=1, tau=0.2, gamma=0.2, first_tau=1.0, noise=noise, surprise=surprise)
    rules.adapt_tau(rho, damped, progress, gn.Damping(anneal=anneal, decay=0.95, tau_interval=5))
    assert progress.tau == progress.gamma == pytest.approx(0.2 * change)


def test_far_too_much_damping_at_the_start_is_got_rid_of() -> None:
    """Steps are then so short that the averaged parameters cannot lag behind."""
    x = torch.randn(2000, 4)
    y = (x[:, :1] * x[:, 1:2]).tanh() + 0.3 * torch.randn(2000, 1)
    net = network([4, 8, 1]).float()
    criterion = nn.MSELoss()
    optimizer = gn.GaussNewton(net, criterion, damping=gn.Damping(tau=1e4))
    for t in range(150):
        part = torch.arange(200) + 200 * (t % 10)
        fit(optimizer, x[part], y[part], 1)
    assert optimizer.diagnostics["tau"] < 100
