"""GaussNewton: the paper to the letter, what is invariant, and what never breaks a run."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton import damping as rules
from gaussnewton.progress import Progress
from gaussnewton.quadratic import Quadratic, gauss_newton_gram
from tests.literal import LiteralPaper
from tests.problems import fit, network, relative


def problem(
    n: int = 40, sizes: tuple[int, ...] = (5, 6, 4, 3), seed: int = 0
) -> tuple[nn.Module, Tensor, Tensor]:
    net = network(list(sizes), seed=seed)
    x = torch.randn(n, sizes[0], dtype=torch.float64)
    y = torch.stack([x[:, i % sizes[0]] * x[:, (i + 1) % sizes[0]] for i in range(sizes[-1])], 1)
    return net, x, y


@pytest.mark.parametrize("eta", [0.0, 1e-3])
def test_paper_to_the_letter(eta: float) -> None:
    net, x, y = problem(n=12)
    twin, criterion, tau = copy.deepcopy(net), nn.MSELoss(), 0.3
    literal = LiteralPaper(twin, nn.MSELoss(), tau, eta)
    settings = gn.PAPER | {"damping": replace(gn.PAPER["damping"], tau=tau)}
    optimizer = gn.GaussNewton(net, criterion, weight_decay=eta, **settings)
    for i in range(25):
        part = slice(0, 8) if i % 2 else slice(4, 12)
        fit(optimizer, x[part], y[part], 1)
        literal.step(x[part], y[part])
        found = optimizer.diagnostics
        assert found["tau"] == pytest.approx(literal.tau, rel=1e-8)
        assert found["gamma"] == pytest.approx(literal.gamma, rel=1e-8)
        assert found["alpha"] == pytest.approx(float(literal.alpha), rel=1e-8)
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            assert relative(p, q) < 1e-8
    for key, value in optimizer.averaged_parameters().items():
        assert relative(value, literal.average[key]) < 1e-8


@pytest.mark.parametrize("settings", [{}, gn.PAPER], ids=["default", "paper"])
def test_scale_of_the_loss_does_not_matter(settings: dict) -> None:
    net, x, y = problem()
    other = copy.deepcopy(net)
    fit(gn.GaussNewton(net, nn.MSELoss(), **settings), x, y, 20)
    fit(gn.GaussNewton(other, nn.MSELoss(reduction="sum"), **settings), x, y, 20)
    assert relative(net(x), other(x)) < 1e-6


@pytest.mark.parametrize("settings", [{}, gn.PAPER], ids=["default", "paper"])
def test_permuted_hidden_units_do_not_matter(settings: dict) -> None:
    net, x, y = problem()
    other = copy.deepcopy(net)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    with torch.no_grad():
        other.layers[0].weight.copy_(net.layers[0].weight[order])
        other.layers[0].bias.copy_(net.layers[0].bias[order])
        other.layers[1].weight.copy_(net.layers[1].weight[:, order])
    fit(gn.GaussNewton(net, nn.MSELoss(), **settings), x, y, 20)
    fit(gn.GaussNewton(other, nn.MSELoss(), **settings), x, y, 20)
    assert relative(net(x), other(x)) < 1e-6


@pytest.mark.parametrize("method", ["auto", "kflr", "kfra", "kfac"])
@pytest.mark.parametrize("inversion", ["factored", "exact"])
def test_ends_below_adam(method: str, inversion: str) -> None:
    net, x, y = problem(n=200)
    other = copy.deepcopy(net)
    optimizer = gn.GaussNewton(net, nn.MSELoss(), curvature=method, inversion=inversion)
    fit(optimizer, x, y, 60)
    adam = torch.optim.Adam(other.parameters(), lr=1e-3)
    for _ in range(60):
        adam.zero_grad()
        nn.MSELoss()(other(x), y).backward()
        adam.step()
    assert nn.MSELoss()(net(x), y) < 0.5 * nn.MSELoss()(other(x), y)


def test_skips_what_is_not_finite_and_gives_up_in_the_end() -> None:
    net, x, y = problem()
    optimizer = gn.GaussNewton(net, nn.MSELoss(), guard=gn.Guard(patience=2))
    fit(optimizer, x, y, 3)
    before, state = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    bad = x.clone()
    bad[0, 0] = float("nan")
    fit(optimizer, bad, y, 2)
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])
    after = optimizer.state_dict()
    for i, part in state["state"].items():
        for key, value in part.items():
            same = torch.equal(value, after["state"][i][key]) if isinstance(value, Tensor) else True
            assert same, key
    fit(optimizer, x, y, 1)
    assert optimizer.param_groups[0]["progress"]["skipped"] == 2
    with pytest.raises(gn.errors.NonFiniteError, match="3 steps in a row"):
        fit(optimizer, bad, y, 3)


OF_NO_STEP = {
    "loss", "t", "tau", "gamma", "noise", "surprise", "boldness", "carried", "refused", "skipped",
    "mended", "wide", "seconds",
}  # fmt: skip
"""What diagnostics say where no step was chosen."""


@pytest.mark.parametrize("make", [gn.GaussNewton, gn.HessianFree])
def test_a_skipped_step_has_no_numbers_of_the_one_before(make: Callable) -> None:
    net, x, y = problem()
    optimizer = make(net, nn.MSELoss())
    fit(optimizer, x, y, 1)
    good = optimizer.diagnostics
    assert {"rho", "predicted"} < set(good)
    fit(optimizer, x * float("nan"), y, 1)
    found = optimizer.diagnostics
    assert set(found) == OF_NO_STEP
    assert math.isnan(found["loss"])
    assert (found["skipped"], found["t"], found["tau"]) == (1, good["t"], good["tau"])
    fit(optimizer, x, y, 1)
    assert {"rho", "predicted"} < set(optimizer.diagnostics)


def test_refuses_a_step_that_raises_the_loss() -> None:
    """Cubes of cubes: far from any quadratic, and hardly damped."""
    net = network([5, 6, 6, 3], "x³")
    x, y = 2 * torch.randn(40, 5).double(), torch.randn(40, 3).double()
    optimizer = gn.GaussNewton(
        net,
        nn.MSELoss(),
        curvature="kflr",
        damping=gn.Damping(tau=1e-9, tau_interval=1),
        step_size=gn.StepSize(momentum=False, calibrate=False),
    )
    with torch.no_grad():
        net.layers[0].weight.mul_(0.1)
    before = [p.clone() for p in net.parameters()]
    fit(optimizer, x, y, 1)
    assert optimizer.diagnostics["rho"] < -1
    assert optimizer.diagnostics["refused"] == 1
    assert optimizer.diagnostics["tau"] > 1e-9
    for p, q in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("smooth", [0.0, 0.7])
def test_the_direction_is_that_of_the_running_mean_of_gradients(smooth: float) -> None:
    """Without calibration each layer's update is parallel to C̃⁻¹ ḡ, written out here, and as long
    as the present batch's slope along it wants."""
    net, x, y = problem(n=60)
    optimizer = gn.GaussNewton(
        net,
        nn.MSELoss(),
        curvature="kflr",
        inversion="exact",
        damping=gn.Damping(tau=0.2, decay=1.0, tau_interval=1, anneal=False),
        step_size=gn.StepSize(smooth=smooth, momentum=False, calibrate=False, share=1.0),
    )
    mean = None
    for t, part in enumerate(torch.arange(60).split(15), start=1):
        before = [p.detach().clone() for p in net.parameters()]
        fit(optimizer, x[part], y[part], 1)
        now = [p.grad.clone() for p in net.parameters()]
        beta = min(smooth, 1 - 1 / t)
        mean = [beta * m + (1 - beta) * g for m, g in zip(mean or now, now, strict=True)]
        update = [p.detach() - q for p, q in zip(net.parameters(), before, strict=True)]
        direction = []
        for layer, m in zip(net.layers, zip(mean[::2], mean[1::2], strict=True), strict=True):
            state = optimizer.state[layer.weight]
            dense = torch.kron(state["Q"], state["G"])
            matrix = torch.cat([m[0], m[1][:, None]], 1)
            damped = dense + 0.2 * torch.eye(len(dense), dtype=torch.float64)
            solved = -torch.linalg.solve(damped, matrix.T.reshape(-1)).reshape(matrix.T.shape).T
            direction += [solved[:, :-1], solved[:, -1]]
        alpha = optimizer.diagnostics["alpha"]
        slope = sum(float((g * d).sum()) for g, d in zip(now, direction, strict=True))
        assert alpha * slope == pytest.approx(2 * optimizer.diagnostics["predicted"])
        for u, d in zip(update, direction, strict=True):
            assert relative(u, alpha * d) < 1e-8


def test_at_first_old_gradients_do_not_count() -> None:
    net, x, y = problem(n=60)
    optimizer = gn.GaussNewton(net, nn.MSELoss(), damping=gn.Damping(tau_interval=3))
    for t, part in enumerate(torch.arange(60).split(10), start=1):
        fit(optimizer, x[part], y[part], 1)
        weight = net.layers[0].weight
        mean = optimizer.state[weight]["gradient"][:, : weight.shape[1]]
        assert torch.equal(mean, weight.grad) == (t <= 3)


def test_layers_are_looked_at_one_by_one_now_and_then() -> None:
    """In between the last scales serve: they stay as they are."""
    net, x, y = problem()
    optimizer = gn.GaussNewton(
        net,
        nn.MSELoss(),
        refresh=gn.Refresh(early=2, curvature=3),
    )
    looked = []
    for _ in range(9):
        fit(optimizer, x, y, 1)
        looked.append(len(optimizer.diagnostics["scales"]) > 0)
    assert looked == [True, True, False, False, True, False, False, True, False]


def test_a_layer_that_rests_keeps_its_mean_gradient_and_its_place() -> None:
    net, x, y = problem()
    optimizer = gn.GaussNewton(net, nn.MSELoss(), step_size=gn.StepSize(smooth=0.7, momentum=False))
    fit(optimizer, x, y, 3)
    resting = list(net.layers[0].parameters())
    kept = [p.detach().clone() for p in resting]
    state = optimizer.state[net.layers[0].weight]
    mean = state["gradient"].clone()
    optimizer.zero_grad()
    optimizer.criterion(net(x), y).backward()
    for p in resting:
        p.grad = None
    optimizer.step()
    assert all(torch.equal(p, place) for p, place in zip(resting, kept, strict=True))
    assert torch.equal(state["gradient"], mean)


def test_factorisations_that_fail_are_mended() -> None:
    """An indefinite factor: more damping helps, and where nothing does the last inverse stays."""
    net, x, y = problem()
    optimizer = gn.GaussNewton(net, nn.MSELoss(), refresh=gn.Refresh(curvature=100, inverse=1))
    fit(optimizer, x, y, 2)
    state = optimizer.state[net.layers[0].weight]
    state["Q"] = state["Q"] - 0.5 * optimizer.diagnostics["tau"] ** 0.5 * torch.eye(6).double() * 3
    losses = fit(optimizer, x, y, 3)
    state["Q"] = -1e12 * torch.eye(6).double()
    losses += fit(optimizer, x, y, 3)
    assert all(torch.isfinite(torch.tensor(losses)))
    assert optimizer.diagnostics["mended"] > 0
    assert losses[-1] < losses[0]


def test_diagnostics_are_plain_numbers() -> None:
    net, x, y = problem()
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    fit(optimizer, x, y, 5)
    found = optimizer.diagnostics
    assert found["rho"] == pytest.approx(found["actual"] / found["predicted"])
    for value in [v for v in found.values() if not isinstance(v, dict)] + [
        *found["scales"].values()
    ]:
        assert isinstance(value, (int, float))
    assert "layers.1" in optimizer.explain()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_minimum_in_a_box_is_the_best_of_a_grid(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    axes = [torch.linspace(-1, 1, 41, dtype=torch.float64)] * k
    grid = torch.cartesian_prod(*axes).reshape(-1, k)
    outside = 0
    for _ in range(30):
        root = torch.randn(k, k + 1, generator=generator, dtype=torch.float64)
        b = 2 * torch.randn(k, generator=generator, dtype=torch.float64)
        model = Quadratic(root @ root.T, b)
        c = model.minimum(most=1.0)
        assert c.abs().max() <= 1
        values = grid @ b + 0.5 * ((grid @ model.M) * grid).sum(1)
        assert float(model.change(c)) <= float(values.min()) + 1e-12
        outside += bool((model.minimum().abs() > 1).any())
    assert outside > 3, "the box was never in the way"


def noisy_problem(batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Labels that are mostly chance: every batch can be fitted, and nothing is learnt by it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 5))
    x = torch.randn(200 * batch, 30)
    y = torch.distributions.Categorical(logits=x[:, :5]).sample()
    return net, x, y


@pytest.mark.parametrize("batch", [8, 16])
def test_small_batches_of_noise_do_not_lead_astray(batch: int) -> None:
    net, x, y = noisy_problem(batch)
    optimizer = gn.GaussNewton(net, nn.CrossEntropyLoss())
    start = nn.functional.cross_entropy(net(x), y).item()
    for part in torch.arange(len(x)).split(batch):
        fit(optimizer, x[part], y[part], 1)
    with optimizer.averaged(), torch.no_grad():
        assert nn.functional.cross_entropy(net(x), y).item() < start


def test_without_annealing_the_same_batches_are_fitted_ever_closer() -> None:
    taus = {}
    for anneal in (True, False):
        net, x, y = noisy_problem(16)
        damping = gn.Damping(anneal=anneal)
        optimizer = gn.GaussNewton(net, nn.CrossEntropyLoss(), damping=damping)
        for part in torch.arange(len(x)).split(16):
            fit(optimizer, x[part], y[part], 1)
        taus[anneal] = optimizer.diagnostics["tau"]
    assert taus[True] > 10 * taus[False]


@pytest.mark.parametrize("times", [1e3, 1e9])
def test_takes_back_a_step_that_a_fresh_batch_finds_to_have_failed(times: float) -> None:
    """As if the third step had gone so many times as far."""
    net, x, y = problem(n=120)
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    fit(optimizer, x[:30], y[:30], 2)
    before = [p.detach().clone() for p in net.parameters()]
    average = optimizer.averaged_parameters()
    fit(optimizer, x[30:60], y[30:60], 1)
    with torch.no_grad():
        for p in net.parameters():
            state = optimizer.state[p]
            update = p - state["start"]
            p.add_(update, alpha=times - 1)
            state["average"].add_(update, alpha=(times - 1) / 3)
    tau = optimizer.diagnostics["tau"]
    fit(optimizer, x[60:], y[60:], 1)
    found = optimizer.diagnostics
    assert set(found) == OF_NO_STEP
    assert (found["refused"], found["t"]) == (1, 4)
    assert found["tau"] > tau
    for p, q in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, q)
    found = optimizer.averaged_parameters()
    for key, q in zip(found, before, strict=True):
        expected = (3 * average[key] + q) / 4
        torch.testing.assert_close(found[key], expected, rtol=0, atol=1e-14 * times)


def test_goes_back_to_the_average_where_it_is_far_better() -> None:
    net, x, y = problem(n=90)
    optimizer = gn.GaussNewton(net, nn.MSELoss(), guard=gn.Guard(fresh_tolerance=1e9))
    fit(optimizer, x, y, 9)
    average = optimizer.averaged_parameters()
    with torch.no_grad():
        net.layers[-1].weight.mul_(50)
    fit(optimizer, x, y, 1)
    assert optimizer.diagnostics["refused"] == 1
    assert set(optimizer.diagnostics) == OF_NO_STEP
    for key, p in net.named_parameters():
        torch.testing.assert_close(p.detach(), average[key])


def test_seconds_of_each_phase() -> None:
    net, x, y = problem()
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    assert optimizer.diagnostics == {"seconds": {}}
    fit(optimizer, x, y, 1)
    seconds = optimizer.diagnostics["seconds"]
    phases = {"record", "damping", "curvature", "first damping", "inversion", "step size"}
    assert set(seconds) == phases
    assert all(isinstance(s, float) and s > 0 for s in seconds.values())


def explained(sizes: list[int], function: nn.Module, n: int = 50) -> str:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), function]
    net = nn.Sequential(*layers[:-1])
    optimizer = gn.GaussNewton(net, nn.MSELoss())
    assert "chosen at the first step" in optimizer.explain()
    x = torch.randn(n, sizes[0])
    fit(optimizer, x, torch.randn(n, sizes[-1]), 1)
    return optimizer.explain()


def test_curvature_is_chosen_by_cost_and_the_reason_told() -> None:
    assert "KFLR is exact, and cheap with 1 output" in explained([8, 16, 16, 1], nn.Tanh())
    text = explained([64, 64, 32, 64, 64], nn.Tanh())
    assert "dear with 64 outputs" in text
    assert "curvature: KFRA, " in text
    # Softmax is not elementwise: KFRA would need a row for each of its outputs.
    assert "cheaper than KFRA" in explained([64, 64, 64, 10], nn.Softmax(dim=1))


def parts_looked_at(
    monkeypatch: pytest.MonkeyPatch, odd: Sequence[int], **settings: Any
) -> list[list[float]]:
    """Which shares of each of 16 batches are looked at, some of which have an odd datum."""
    parts: list[list[float]] = []

    def spied(*args: Any, part: float, least: int) -> Tensor:
        parts[-1].append(part)
        return gauss_newton_gram(*args, part=part, least=least)

    monkeypatch.setattr("gaussnewton.looking.gauss_newton_gram", spied)
    model, criterion = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)), nn.MSELoss()
    optimizer = gn.GaussNewton(model, criterion, damping=gn.Damping(tau=1e-3), **settings)
    everything = torch.randn(1200, 5)
    for t in range(16):
        x = everything.roll(100 * t, 0)[:1000]
        y = x[:, :3] * x[:, 2:]
        if t in odd:
            y[900] = torch.tensor([300.0, -300.0, 300.0])  # outside of the first quarter
        parts.append([])
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return parts


@pytest.mark.parametrize("calibrate", [True, False])
def test_the_whole_batch_is_asked_where_a_part_of_it_promises_too_much(
    calibrate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_size = gn.StepSize(calibrate=calibrate)
    parts = parts_looked_at(monkeypatch, odd=(11, 13), step_size=step_size)
    assert parts[:11] == [[0.25]] * 11
    assert parts[11] == [0.25, 1.0]
    assert parts[13] == [0.25, 1.0]  # the first one has not become the measure


def test_a_small_learning_rate_does_not_make_promises_look_great(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert parts_looked_at(monkeypatch, odd=(), lr=0.05) == [[0.25]] * 16


def test_inverses_serve_on_until_gamma_has_moved_far() -> None:
    progress = Progress(tau=1.0, gamma=1.0, inverted_with=1.0)
    for gamma, moved in ((1.0, False), (1.29, False), (0.774, False), (1.67, True), (0.59, True)):
        progress.gamma = gamma
        assert rules.has_moved(progress) is moved
    assert rules.has_moved(Progress(gamma=1.0))


@pytest.mark.parametrize(
    ("wanted", "least"),
    [(0.0, 1.0), (1.0, 1.0), (1.3, 3.0), (8.0, 10.0), (20.0, 30.0), (400.0, 100.0)],
)
def test_the_first_dampings_tried_are_greater_for_few_data(wanted: float, least: float) -> None:
    x, y = torch.randn(5, 3).double(), torch.randn(5, 1).double()
    blocks = gn.curvature(network([3, 6, 1]), nn.MSELoss(), (x, y))
    tried = rules.first_candidates(blocks, wanted, gn.Damping())
    assert tried[0] == pytest.approx(least * rules.mean_eigenvalue(blocks))
    assert tried[-1] == pytest.approx(10_000 * rules.mean_eigenvalue(blocks))
    assert rules.first_candidates(blocks, wanted, gn.Damping(tau=0.3)) == [0.3]


@pytest.mark.parametrize(("passes", "least"), [(1, 30.0), (3, 10.0)])
def test_data_of_several_passes_count_for_the_first_damping(
    passes: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, before = [], rules.first_candidates

    def noted(blocks: Any, wanted: float, settings: gn.Damping) -> list[float]:
        counted.append(wanted)
        return before(blocks, wanted, settings)

    monkeypatch.setattr(rules, "first_candidates", noted)
    net = network([40, 3, 2])
    x, y = torch.randn(2 * passes, 40).double(), torch.randn(2 * passes, 2).double()
    criterion = nn.MSELoss()
    optimizer = gn.GaussNewton(net, criterion)
    for a, b in zip(x.split(2), y.split(2), strict=True):
        (criterion(net(a), b) / passes).backward()
    optimizer.step()
    assert counted == [pytest.approx(41 / (1.5 * 2 * passes))]
    mean = rules.mean_eigenvalue(optimizer._blocks())
    multiple = optimizer.param_groups[0]["progress"]["first_tau"] / mean
    assert min(abs(multiple / m - 1) for m in (1, 3, 10, 30, 100, 300, 1000)) < 1e-6
    assert multiple > 0.99 * least
