"""How often the full Gauss-Newton matrix is asked, and what is expected of it in between."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.chain import Chain
from gaussnewton.looking import expecting, look_is_due
from gaussnewton.observer import Observer
from gaussnewton.progress import Progress
from gaussnewton.proposal import Gram, plain
from gaussnewton.quadratic import gauss_newton_gram
from tests.problems import fit, network

SCALES = (0.7, -0.3)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x).tanh()


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.randn(40, 4, dtype=torch.float64)
    return network([4, 5, 3]), x, torch.stack([x[:, 0] * x[:, 1], x[:, 2], x[:, 3] ** 2], 1)


def gradient(net: nn.Module, criterion: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    net.zero_grad()
    criterion(net(x), y).backward()
    found = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    return gn.Theta(net).vector(found)


@pytest.mark.parametrize("calibrate", [True, False])
def test_without_a_look_curvature_is_as_many_times_that_of_the_blocks(calibrate: bool) -> None:
    """Written out: d = −S C̃⁻¹ g, α = −gᵀd / (r dᵀC̃d + τ dᵀd), r as it was an update before."""
    net, x, y = problem()
    criterion, tau, share = nn.MSELoss(), 0.05, 0.6
    optimizer = gn.GaussNewton(
        net,
        criterion,
        curvature="kflr",
        inversion="exact",
        damping=gn.Damping(tau=tau, tau_interval=1000, anneal=False),
        step_size=gn.StepSize(
            smooth=0.0, calibrate=calibrate, share=share, ask=9, growth=9.0, part=1.0, most=1e9
        ),
        refresh=gn.Refresh(early=0, curvature=100),
    )
    fit(optimizer, x, y, 1)
    blocks = [block.dense() for block in optimizer._blocks().values()]
    logs = torch.tensor(SCALES).double() if calibrate else torch.zeros(2).double()
    S = torch.cat([s.exp().expand(len(b)) for s, b in zip(logs, blocks, strict=True)])
    if calibrate:
        for group, s in zip(gn.Theta(net), logs, strict=True):
            optimizer._layer_state(group.name)["log_scale"] = s
    optimizer.param_groups[0]["progress"]["bend"] = 0.0  # the first to be looked at is next
    damped = torch.block_diag(*blocks) + tau * torch.eye(len(S)).double()
    ratio = None
    for _ in range(3):
        before = copy.deepcopy(net)
        fit(optimizer, x, y, 1)
        g = gradient(before, criterion, x, y)
        d = -S * torch.linalg.solve(damped, g)
        own, full = d @ damped @ d, d @ gn.exact.gauss_newton(before, criterion, (x, y)) @ d
        if ratio is None:
            ratio = float(full / own)
        else:
            assert float(full / own) != pytest.approx(ratio, rel=1e-3)
        alpha = share * float(-(g @ d) / (ratio * own + tau * d @ d))
        assert optimizer.diagnostics["alpha"] == pytest.approx(alpha, rel=1e-6)
        assert optimizer.param_groups[0]["progress"]["bend"] == pytest.approx(ratio, rel=1e-6)


def test_what_was_found_while_looking_for_damping_does_not_count() -> None:
    net, x, y = problem()
    step_size = gn.StepSize(calibrate=False, smooth=0.0, part=1.0)
    optimizer = gn.GaussNewton(net, nn.MSELoss(), curvature="kflr", step_size=step_size)
    before = copy.deepcopy(net)
    fit(optimizer, x, y, 1)
    g, progress = gradient(before, nn.MSELoss(), x, y), optimizer.param_groups[0]["progress"]
    d = -torch.cat([
        optimizer._inverses[group.name].solve(V).T.flatten()
        for group, V in zip(gn.Theta(net), gn.Theta(net).matrices(g).values(), strict=True)
    ])  # fmt: skip
    full = d @ gn.exact.gauss_newton(before, nn.MSELoss(), (x, y)) @ d
    assert progress["bend"] == pytest.approx(float(-full / (g @ d)), rel=1e-6)


def looks(monkeypatch: pytest.MonkeyPatch, updates: int, **settings: Any) -> list[int]:
    """How often each update asks for products with the Jacobian."""
    count: list[int] = []

    def spied(*args: Any, **more: Any) -> Tensor:
        count[-1] += 1
        return gauss_newton_gram(*args, **more)

    monkeypatch.setattr("gaussnewton.looking.gauss_newton_gram", spied)
    net, x, y = problem()
    refresh = gn.Refresh(early=2, curvature=6, growth=0.0)
    lr, damping = settings.pop("lr", 1.0), settings.pop("damping", gn.Damping(tau_interval=100))
    layers = [{"params": layer.parameters()} for layer in net.layers]
    params = None if lr == 1.0 else [layers[0], layers[1] | {"lr": lr}]
    optimizer = gn.GaussNewton(
        net,
        nn.MSELoss(),
        params,
        damping=damping,
        refresh=refresh,
        step_size=gn.StepSize(**settings),
    )
    for _ in range(updates):
        count.append(0)
        fit(optimizer, x, y, 1)
    count[0] = min(count[0], 1)  # τ is looked for
    return count


@pytest.mark.parametrize(
    ("falls", "tried"),
    [
        ([5.0, 4.6, 4.4, 9.0], 2),
        ([-1.0, 2.0, 1.9, 1.7], 3),
        ([1.0] * 9, 9),
        ([-3.0, -2.0, -9.0], 9),
    ],
)
def test_no_more_first_dampings_are_tried_than_needed(
    falls: list[float], tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x, y = problem()
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    count = []

    def after(*_: object) -> Tensor:
        count.append((falls + falls[-1:] * 9)[len(count)])
        return nn.MSELoss()(net(x), y).detach() - count[-1]

    monkeypatch.setattr(optimizer, "_evaluate_after", after)
    fit(optimizer, x, y, 1)
    assert len(count) == tried


def test_looks_grow_rarer_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    step_size = gn.StepSize(ask=3, growth=0.2)
    assert [step_size.interval(t) for t in (1, 9, 10, 15, 100)] == [1, 1, 2, 3, 3]
    monkeypatch.setattr("gaussnewton.looking.WIDE", math.inf)
    found = looks(monkeypatch, 20, ask=3, growth=0.2)
    # Layers are calibrated at 1, 2, 8, 14 and 20, which takes products too, and is no look.
    assert found == [1] * 9 + [0, 1, 0, 1] + [1, 0, 1, 0, 0, 1, 1]


def test_looks_where_rho_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaussnewton.looking.WIDE", math.inf)
    damping = gn.Damping(tau_interval=5, growth=0.0)
    found = looks(monkeypatch, 20, ask=3, growth=0.2, damping=damping)
    assert found == [1] * 9 + [1, 0, 1, 0] + [1, 1, 0, 0, 1, 0, 1]


def test_looks_always_where_batches_say_different_things(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaussnewton.looking.WIDE", 0.0)
    assert looks(monkeypatch, 20, ask=3, growth=0.2) == [1] * 20


@pytest.mark.parametrize(
    ("model", "spread", "looked", "due"),
    [
        (nn.Linear(2, 3), 0.0, 99, False),
        (nn.Linear(2, 3), 0.0, 95, True),
        (nn.Linear(2, 3), 0.7, 99, True),
        (nn.Linear(2, 3), 0.5, 99, False),
        (Branching(), 0.7, 99, False),  # no chain: a look is another pass
        (Branching(), 0.0, 95, True),
    ],
)
def test_when_a_look_is_due(model: nn.Module, spread: float, looked: int, due: bool) -> None:
    criterion = nn.MSELoss()
    observer = Observer(model, criterion)
    criterion(model(torch.randn(4, 2)), torch.randn(4, 3)).backward()
    progress = Progress(t=100, spread=spread, looked=looked)
    assert look_is_due(observer.take(), gn.StepSize(ask=5, growth=0.1), progress) == due


def test_a_chain_that_had_to_be_run_again_is_looked_through_no_more_often() -> None:
    """Whoever asked for its layers before: a resumed run does so at another update."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Softmax(-1), nn.Linear(3, 3))
    criterion = nn.MSELoss()
    observer = Observer(model, criterion)
    criterion(model(torch.randn(4, 2)), torch.randn(4, 3)).backward()
    (observation,) = observer.take()
    assert observation.layers is None
    assert isinstance(observation.passage, Chain)
    progress = Progress(t=100, spread=0.7, looked=99)
    assert not look_is_due([observation], gn.StepSize(ask=5), progress)


def test_a_change_of_gamma_takes_a_look() -> None:
    net, x, y = problem()
    optimizer = gn.GaussNewton(
        net,
        nn.MSELoss(),
        damping=gn.Damping(tau=0.1, tau_interval=1000),
        step_size=gn.StepSize(smooth=0.0, calibrate=False, ask=100, growth=9.0),
        refresh=gn.Refresh(early=1, curvature=100, inverse=1),
    )
    bends = []
    for gamma in (0.1, 0.1, 0.13, 0.3, 0.3):
        if optimizer.param_groups[0]["progress"]["t"]:
            optimizer.param_groups[0]["progress"]["gamma"] = gamma
        fit(optimizer, x, y, 1)
        bends.append(optimizer.param_groups[0]["progress"]["bend"])
    assert bends[0] == bends[1] == bends[2]
    assert bends[3] < 0.9 * bends[2]  # more damping in C̃, and nothing kept of what was before
    assert bends[4] == bends[3]


@pytest.mark.parametrize(
    ("believed", "asked"), [(1e9, []), (40.0, ["part"]), (0.4, ["part", "whole"])]
)
def test_the_last_look_is_the_one_to_be_kept(believed: float, asked: list[str]) -> None:
    """Along one direction: bᵀd = −1, and 1/2M is promised."""
    found, progress = [], Progress(bend=0.005)

    def look(name: str, M: float, _: object, others: object) -> Tensor:
        assert others is not None
        found.append(name)
        return torch.full((1, 1), M).double()

    both: list[Gram] = [partial(look, "part", 0.02), partial(look, "whole", 1.0)]
    along, slope = {"a": torch.ones(1, 1).double()}, {"a": -torch.ones(1, 1).double()}
    proposal = plain(
        slope, along, None, expecting(both, lambda _: torch.tensor(0.5).double(), False, progress),
        {"a": 0.0}, believed=believed,
    )  # fmt: skip
    assert found == asked
    M = {"part": 0.02, "whole": 1.0}.get(asked[-1] if asked else "", 0.005 * 0.5)
    assert float(proposal.coefficients) == pytest.approx(1 / M)
    expected = 0.005 if not asked else 0.005**0.7 * (M / 0.5) ** 0.3
    assert progress.bend == pytest.approx(expected)
    off = abs(math.log(M / 0.5 / 0.005)) if asked else 0.0
    assert progress.spread == pytest.approx(0.3 * min(off, 3.0))


def test_always_looks_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks(monkeypatch, 12, ask=1, growth=1.0) == [1] * 12


def test_several_directions_are_always_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks(monkeypatch, 12, momentum=True, growth=1.0) == [1] * 12
    settings = {"damping": gn.Damping(gamma="search", gamma_interval=4, tau_interval=100)}
    assert looks(monkeypatch, 12, growth=1.0, **settings) == ([1] * 3 + [3]) * 3
    # With two rates the step is no multiple of the direction, and is looked at itself.
    assert looks(monkeypatch, 12, lr=0.5, growth=1.0)[1:] == [2] * 11


def test_an_expectation_that_promises_too_much_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, x, y = problem()
    optimizer = gn.GaussNewton(
        net,
        nn.MSELoss(),
        damping=gn.Damping(tau_interval=100),
        refresh=gn.Refresh(early=1, curvature=100),
        step_size=gn.StepSize(ask=50, growth=9.0),
    )
    fit(optimizer, x, y, 4)
    progress, asked = optimizer.param_groups[0]["progress"], []

    def spied(*args: Any, **more: Any) -> Tensor:
        asked.append(True)
        return gauss_newton_gram(*args, **more)

    monkeypatch.setattr("gaussnewton.looking.gauss_newton_gram", spied)
    fit(optimizer, x, y, 1)
    assert asked == []
    found = progress["bend"]
    optimizer.param_groups[0]["progress"]["promise"] *= 1e-3
    fit(optimizer, x, y, 1)
    assert asked == [True]
    assert optimizer.param_groups[0]["progress"]["bend"] != found
