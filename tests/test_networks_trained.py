"""GaussNewton and HessianFree on networks that are no chains."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton import jacobian
from gaussnewton.jacobian import gauss_newton_product, jacobian_product, layer_jacobian_products
from gaussnewton.observer import Observer
from gaussnewton.tangents import push
from tests.estimators.test_shared import again_first, images, residual, twice
from tests.problems import fit, relative


def observed(problem, n: int):
    model, batch = problem(n)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    observer = Observer(model, criterion)
    criterion(model(batch[0]), batch[1]).backward()
    (observation,) = observer.take()
    return model, criterion, batch, observation, observer


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch.func itself
@pytest.mark.parametrize("problem", [residual, images, twice, again_first])
def test_jacobian_products_are_exact(problem) -> None:
    model, _, (x, _), observation, observer = observed(problem, 5)
    torch.manual_seed(1)
    directions = {
        g.name: torch.randn(2, g.rows, g.columns, dtype=torch.float64) for g in observer.theta
    }
    names = dict(model.named_parameters())

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,))

    expected = []
    for k in range(2):
        tangents = {}
        for group in observer.theta:
            tangents |= group.tensors(directions[group.name][k])
        expected.append(torch.func.jvp(outputs, (names,), (tangents,))[1])
    with observer.paused():
        found = jacobian_product(observation.passage, directions)
        assert relative(found, torch.stack(expected)) < 1e-10
        part = jacobian_product(observation.passage, directions, slice(0, 3))
        assert relative(part, torch.stack(expected)[:, :3]) < 1e-10
        first = {name: V[0] for name, V in directions.items()}
        layers = layer_jacobian_products(observation.passage, first)
    assert len(layers) == len(first)
    assert relative(layers.sum(0), expected[0]) < 1e-10


def test_jacobian_products_of_a_pass_with_dropout_are_of_that_pass() -> None:
    torch.manual_seed(0)
    dropped = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(6, 2))
    x, y = torch.randn(4, 2, 3), torch.randint(2, (4,))
    criterion = nn.CrossEntropyLoss()
    observer = Observer(dropped, criterion)
    outputs = dropped(x)
    rows = torch.autograd.grad(outputs[1, 0], list(dropped.parameters()), retain_graph=True)
    criterion(outputs, y).backward()
    (observation,) = observer.take()
    direction = {g.name: torch.randn(1, g.rows, g.columns) for g in observer.theta}
    found = jacobian_product(observation.passage, direction, slice(0, 2))
    tangents = [t for g in observer.theta for t in g.tensors(direction[g.name][0]).values()]
    expected = sum((r * t).sum() for r, t in zip(rows, tangents, strict=True))
    torch.testing.assert_close(found[0, 1, 0], expected)


@pytest.mark.parametrize("problem", [residual, images, twice, again_first])
def test_gauss_newton_products_are_exact(problem) -> None:
    model, criterion, batch, observation, observer = observed(problem, 4)
    torch.manual_seed(1)
    v = torch.randn(observer.theta.size, dtype=torch.float64)
    found = gauss_newton_product(observation.passage, observer.theta.matrices(v))
    expected = gn.exact.gauss_newton_product(model, criterion, batch)(v)
    assert relative(observer.theta.join(found), expected) < 1e-10


@pytest.mark.parametrize("problem", [residual, images, twice, again_first])
@pytest.mark.parametrize("kind", [gn.GaussNewton, gn.HessianFree])
def test_trains(problem, kind) -> None:
    model, (x, _) = problem(60)
    y = (x.flatten(1).sum(1) > 0).long()
    criterion = nn.CrossEntropyLoss()
    optimizer = kind(model, criterion)
    losses = fit(optimizer, x, y, 15)
    assert losses[-1] < 0.6 * losses[0]


def test_trains_with_batch_normalisation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )
    x = torch.randn(80, 1, 6, 6)
    y = (x.flatten(1).sum(1) > 0).long()
    criterion = nn.CrossEntropyLoss()
    optimizer = gn.GaussNewton(model, criterion)
    losses = fit(optimizer, x, y, 15)
    assert losses[-1] < 0.3 * losses[0]
    assert int(model[1].num_batches_tracked) == 15  # passes of the optimiser's own do not count
    assert "KFAC" in optimizer.explain()


class Deep(nn.Module):
    """A residual network of linear layers, as many as asked for."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.3 * torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(("layers", "most"), [(8, 8), (9, 1)])
def test_products_of_an_update_are_few_however_many_layers_there_are(
    monkeypatch, layers: int, most: int
) -> None:
    torch.manual_seed(0)
    model, criterion = Deep(layers), nn.CrossEntropyLoss()
    optimizer = gn.GaussNewton(model, criterion)
    x = torch.randn(60, 4)
    y = (x.sum(1) > 0).long()
    first = fit(optimizer, x, y, 2)[0]
    asked = []

    def counted(network, directions, part) -> Tensor:
        asked.append(len(directions))
        return push(network, directions, part)

    monkeypatch.setattr(jacobian, "push", counted)
    last = fit(optimizer, x, y, 8)[-1]
    assert sum(asked) == 8 * most
    assert len(optimizer.diagnostics["scales"]) == (layers if layers <= 8 else 0)
    assert last < 0.6 * first


@pytest.mark.parametrize("layers", [0, 8])
def test_between_two_looks_a_network_is_not_run_again(monkeypatch, layers: int) -> None:
    """Whether its layers are calibrated or, being too many, are not."""
    monkeypatch.setattr("gaussnewton.looking.WIDE", math.inf)
    model, (x, y) = residual(20)
    criterion, passes = nn.CrossEntropyLoss(), [0]
    model.register_forward_pre_hook(lambda *_: passes.__setitem__(-1, passes[-1] + 1))
    optimizer = gn.GaussNewton(
        model,
        criterion,
        curvature="kflr",
        damping=gn.Damping(tau=1e-2, tau_interval=50),
        step_size=gn.StepSize(growth=1.0, layers=layers),
        refresh=gn.Refresh(early=1, curvature=50),
    )
    for _ in range(20):
        passes.append(0)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    assert passes[1] > 1  # curvature and a look
    assert passes[6:].count(1) >= 8  # a look at every fifth, or what is not believed


def test_resumes_bit_for_bit_with_groups() -> None:
    model, (x, y) = images(20)
    criterion = nn.CrossEntropyLoss()
    optimizer = gn.GaussNewton(model, criterion)

    def step(model: nn.Module, optimizer: gn.GaussNewton) -> None:
        optimizer.zero_grad()
        optimizer.criterion(model(x), y).backward()
        optimizer.step()

    for _ in range(3):
        step(model, optimizer)
    twin, same = copy.deepcopy(model), nn.CrossEntropyLoss()
    other = gn.GaussNewton(twin, same)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        step(model, optimizer)
        step(twin, other)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_experts_that_are_not_used_keep_their_curvature() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.last = nn.Linear(4, 3)

        def forward(self, x: Tensor, which: int) -> Tensor:
            return self.last(torch.tanh(self.experts[which](x)))

    torch.manual_seed(0)
    model, criterion = Experts(), nn.CrossEntropyLoss()
    optimizer = gn.GaussNewton(model, criterion)
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    factors = []
    for which in (0, 1, 1, 1, 0):
        optimizer.zero_grad()
        criterion(model(x, which), y).backward()
        before = [p.detach().clone() for p in model.experts[1 - which].parameters()]
        optimizer.step()
        assert all(
            torch.equal(p, q)
            for p, q in zip(model.experts[1 - which].parameters(), before, strict=True)
        )
        factors.append(optimizer.state[model.experts[0].weight]["G"].clone())
    assert factors[0].any()
    assert torch.equal(factors[0], factors[3])
    assert not torch.equal(factors[3], factors[4])


def test_a_layer_that_only_the_second_of_two_passes_uses_has_that_ones_curvature() -> None:
    """Whatever its kind of block: here one that is written out."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, x: Tensor, normalised: bool) -> Tensor:
            return self.last(self.norm(x) if normalised else x)

    torch.manual_seed(0)
    x, y = torch.randn(10, 4), torch.randint(3, (10,))
    found = []
    for passes in ([True], [False, True]):
        torch.manual_seed(1)
        model, criterion = Sometimes(), nn.CrossEntropyLoss()
        optimizer = gn.GaussNewton(model, criterion, curvature="kflr")
        for normalised in passes:
            criterion(model(x, normalised), y).backward()
        optimizer.step()
        found.append(optimizer.state[model.norm.weight]["matrix"])
    torch.testing.assert_close(found[0], found[1])
