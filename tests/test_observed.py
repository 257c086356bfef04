"""What a loop may do around GaussNewton, and what it is told when it may not."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from tests.problems import relative


def parts(criterion: nn.Module | None = None, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    criterion = criterion or nn.MSELoss()
    return model, criterion, gn.GaussNewton(model, criterion, **settings)


def data(n: int = 20, seed: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x, torch.stack([x[:, 0] * x[:, 1], x.sum(1).sin()], 1)


def train(model, criterion, optimizer, x, y, updates: int) -> list[float]:
    losses = []
    for _ in range(updates):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_layer_without_gradient_does_not_stop_the_others() -> None:
    """The last layer starts at zero, so nothing reaches the first at the first step."""
    model, criterion, optimizer = parts()
    nn.init.zeros_(model[2].weight)
    losses = train(model, criterion, optimizer, *data(), 40)
    assert losses[-1] < 0.2 * losses[0]
    assert optimizer.diagnostics["refused"] == 0


def test_dead_units_do_not_stop_the_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    criterion = nn.MSELoss()
    optimizer = gn.GaussNewton(model, criterion)
    x, y = data()
    train(model, criterion, optimizer, x, y, 3)
    with torch.no_grad():
        model[0].bias.fill_(-100)
    losses = train(model, criterion, optimizer, x, y + 1, 30)
    best = (y + 1 - (y + 1).mean(0)).square().mean().item()
    assert losses[-1] == pytest.approx(best, rel=0.05)


@pytest.mark.parametrize("kind", [gn.GaussNewton, gn.HessianFree])
def test_learns_anew_after_convergence(kind) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2))
    criterion = nn.MSELoss()
    optimizer = kind(model, criterion)
    x = torch.randn(30, 4)
    weight = torch.randn(4, 2)
    train(model, criterion, optimizer, x, x @ weight, 200)
    losses = train(model, criterion, optimizer, x, x @ weight + 3, 40)
    assert losses[-1] < 0.05 * losses[0]


def test_nothing_to_do_is_not_a_failure() -> None:
    model, criterion, optimizer = parts()
    x, _ = data()
    train(model, criterion, optimizer, *data(), 2)
    tau = optimizer.diagnostics["tau"]
    y = model(x).detach()
    train(model, criterion, optimizer, x, y, 20)
    assert optimizer.diagnostics["refused"] == 0
    assert optimizer.diagnostics["tau"] <= tau


def test_parameters_that_are_not_given_are_refused() -> None:
    model, criterion, _ = parts()
    with pytest.raises(ValueError, match=r"not given: 0\.weight, 0\.bias"):
        gn.GaussNewton(model, criterion, model[2].parameters())
    with pytest.raises(ValueError, match="not parameters of the model"):
        gn.GaussNewton(model, criterion, [*model.parameters(), nn.Parameter(torch.zeros(3))])


def test_several_calls_of_the_criterion_on_one_output() -> None:
    model, criterion, optimizer = parts(nn.CrossEntropyLoss())
    x, _ = data()
    first, second = (torch.randint(2, (20,)) for _ in range(2))
    out = model(x)
    loss = 0.3 * criterion(out, first) + 0.7 * criterion(out, second)
    loss.backward()
    optimizer.step()
    assert optimizer.diagnostics["loss"] == pytest.approx(loss.item(), rel=1e-12)
    soft, same_criterion, other = parts(nn.CrossEntropyLoss())
    target = 0.3 * nn.functional.one_hot(first, 2) + 0.7 * nn.functional.one_hot(second, 2)
    train(soft, same_criterion, other, x, target.double(), 1)
    for p, q in zip(model.parameters(), soft.parameters(), strict=True):
        assert relative(p, q) < 1e-7


def test_looked_at_first_and_trained_on_later() -> None:
    model, criterion, optimizer = parts()
    twin, same_criterion, other = parts()
    x, y = data()
    for _ in range(3):
        optimizer.zero_grad()
        out = model(x)
        criterion(out, y).item()
        criterion(out, y).backward()
        optimizer.step()
    train(twin, same_criterion, other, x, y, 3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_two_passes_before_their_losses() -> None:
    model, criterion, optimizer = parts()
    (x, y), (a, b) = data(seed=1), data(seed=2)
    one, two = model(x), model(a)
    loss = criterion(two, b) + criterion(one, y)
    loss.backward()
    optimizer.step()
    assert optimizer.diagnostics["loss"] == pytest.approx(loss.item(), rel=1e-12)


def test_losses_weighted_one_by_one_are_refused() -> None:
    model, criterion, _ = parts(nn.MSELoss(reduction="none"))
    x, y = data()
    weights = torch.linspace(0.1, 2, 20).double().unsqueeze(1)
    with pytest.raises(gn.errors.RecordError, match="weighted one by one"):
        (criterion(model(x), y) * weights).mean().backward()


@pytest.mark.parametrize("decays", [(0.0, 2.0), (2.0, 0.0)])
def test_weight_decay_of_its_own_for_the_bias(decays: tuple[float, float]) -> None:
    """On a quadratic problem the quadratic model is exact, penalty included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2)).double()
    criterion = nn.MSELoss()
    groups = [
        {"params": [model[0].weight], "weight_decay": decays[0]},
        {"params": [model[0].bias], "weight_decay": decays[1]},
    ]
    damping = gn.Damping(tau=1e-9, tau_interval=1)
    optimizer = gn.GaussNewton(model, criterion, groups, damping=damping)
    for _ in range(4):
        train(model, criterion, optimizer, *data(), 1)
        assert optimizer.diagnostics["rho"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("rates", [(1.0, 0.01), (0.01, 1.0), (0.0, 1.0)])
def test_rho_is_of_the_step_as_taken(rates: tuple[float, float]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2)).double()
    criterion = nn.MSELoss()
    groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), rates, strict=True)]
    optimizer = gn.GaussNewton(
        model, criterion, groups, damping=gn.Damping(tau=1e-9, tau_interval=1)
    )
    for _ in range(3):
        train(model, criterion, optimizer, *data(), 1)
        assert optimizer.diagnostics["rho"] == pytest.approx(1, abs=1e-3)


def test_hessian_free_judges_the_step_as_taken() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2)).double()
    criterion = nn.MSELoss()
    optimizer = gn.HessianFree(model, criterion, lr=0.1, damping=1e-6)
    train(model, criterion, optimizer, *data(), 3)
    assert optimizer.diagnostics["rho"] == pytest.approx(1, abs=1e-3)


def test_a_step_without_gradients_does_nothing_with_weight_decay_too() -> None:
    model, _, optimizer = parts(weight_decay=1e-3)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert all(torch.equal(p, before[key]) for key, p in model.state_dict().items())


def test_no_curvature_at_all_is_said() -> None:
    model, criterion, optimizer = parts(gn.Loss(nn.functional.l1_loss))
    with pytest.raises(gn.errors.FactorisationError, match="zero in every layer"):
        train(model, criterion, optimizer, *data(), 1)


def test_an_interrupt_leaves_the_parameters_as_they_were(monkeypatch) -> None:
    model, criterion, optimizer = parts(damping=gn.Damping(tau=0.1, tau_interval=1))
    x, y = data()
    train(model, criterion, optimizer, x, y, 2)
    before = copy.deepcopy(model.state_dict())

    def interrupted(*_: object) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer._observer, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, criterion, optimizer, x, y, 1)
    assert all(torch.equal(p, before[key]) for key, p in model.state_dict().items())


def test_a_resumed_run_keeps_the_curvature_it_chose() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 20)).double()
    criterion = nn.MSELoss()
    optimizer = gn.GaussNewton(model, criterion)
    x = torch.randn(256, 20).double()
    train(model, criterion, optimizer, x, x, 3)
    assert "KFRA" in optimizer.explain()
    twin = copy.deepcopy(model)
    resumed = gn.GaussNewton(twin, criterion)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(twin, criterion, resumed, x[:1], x[:1], 1)
    assert "KFRA" in resumed.explain()
    train(model, criterion, optimizer, x[:1], x[:1], 1)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("frozen", ["0.weight 0.bias", "0.bias", "2.bias"])
def test_freezing_and_unfreezing_on_the_way(frozen: str) -> None:
    model, criterion, optimizer = parts()
    x, y = data()
    train(model, criterion, optimizer, x, y, 3)
    named = dict(model.named_parameters())
    for key in frozen.split():
        named[key].requires_grad_(False)
        named[key].grad = None
    before = {key: p.detach().clone() for key, p in named.items()}
    train(model, criterion, optimizer, x, y, 3)
    for key, p in named.items():
        assert torch.equal(p, before[key]) == (key in frozen.split()), key
    for p in named.values():
        p.requires_grad_(True)
    losses = train(model, criterion, optimizer, x, y, 10)
    assert losses[-1] < losses[0]
    assert not torch.equal(named[frozen.split()[0]], before[frozen.split()[0]])


def test_buffers_made_in_the_forward_pass() -> None:
    class Cached(nn.Tanh):
        def forward(self, x: Tensor) -> Tensor:
            if "cache" not in self._buffers:
                self.register_buffer("cache", torch.zeros(3))
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Cached(), nn.Linear(6, 2)).double()
    criterion = nn.MSELoss()
    losses = train(model, criterion, gn.GaussNewton(model, criterion), *data(), 3)
    assert losses[-1] < losses[0]


def test_passes_that_are_not_trained_on_are_nobodys_business() -> None:
    model, criterion, optimizer = parts()
    x, y = data()
    model(x[0])  # one datum without a batch dimension
    torch.func.vmap(lambda row: model(row))(x)
    criterion(nn.Linear(4, 1).double()(x).squeeze(1), y[:, 0])
    with pytest.raises(gn.errors.BatchError, match="batch dimension"):
        criterion(model(x[0]), y[0])
    losses = train(model, criterion, optimizer, x, y, 5)
    assert losses[-1] < losses[0]


def test_losses_that_are_never_differentiated_are_let_go_of() -> None:
    model, criterion, _ = parts()
    x, y = data()
    gc.disable()
    try:
        out = model(x)
        seen = weakref.ref(out)
        criterion(out, y).item()
        del out
        assert seen() is None
    finally:
        gc.enable()


def test_a_gradient_that_is_not_finite_is_skipped_and_blames_no_step() -> None:
    model, criterion, optimizer = parts()
    x, y = data()
    train(model, criterion, optimizer, x, y, 3)
    before = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    model[0].weight.grad[0, 0] = torch.nan
    optimizer.step()
    assert optimizer.diagnostics["skipped"] == 1
    assert optimizer.diagnostics["refused"] == 0
    assert all(torch.equal(p, before[key]) for key, p in model.state_dict().items())


def test_hooks_go_with_the_optimiser() -> None:
    model, criterion, optimizer = parts()
    count = len(model[0]._forward_hooks)
    assert count == 1
    for _ in range(5):
        optimizer = gn.GaussNewton(model, criterion)
        gc.collect()
    assert len(model[0]._forward_hooks) == 1
    del optimizer
    gc.collect()
    assert not model[0]._forward_hooks


MISTAKES = {
    "GaussNewton(m.parameters(), c)": "TypeError: the first argument is the model",
    "GaussNewton(c, m)": "ValueError: MSELoss has no parameter to train. The model comes first",
    "GaussNewton(m, nn.MSELoss)": "TypeError: the criterion is the class MSELoss; make an instance",
    "GaussNewton(m, c, lr=-1)": "ValueError: lr must not be negative",
    "GaussNewton(m, c, weight_decay=-1)": "ValueError: weight_decay must not be negative",
    "GaussNewton(m, c, damping=0.1)": "TypeError: damping is a gn.Damping(…), not float",
    "GaussNewton(m, c, curvature='kfar')": "ValueError: there is no method 'kfar'",
    "GaussNewton(m, c, curvature='hessian')": "ValueError: a Hessian need not be positive",
    "GaussNewton(m, c, inversion='fast')": "ValueError: inversion is 'factored' or 'exact'",
}


def test_likely_mistakes_are_told_where_they_are_made() -> None:
    """In a process of its own, without the checks of annotations, as users have it."""
    code = f"""
import gaussnewton as gn
from torch import nn
m, c = nn.Linear(3, 2), nn.MSELoss()
for mistake in {list(MISTAKES)!r}:
    try:
        eval("gn." + mistake)
        print("nothing was said")
    except Exception as error:
        print(type(error).__name__ + ": " + str(error))
"""
    command = [sys.executable, "-W", "ignore", "-X", "utf8", "-c", code]
    said = subprocess.run(command, capture_output=True, encoding="utf8", check=True).stdout
    for line, (mistake, message) in zip(said.splitlines(), MISTAKES.items(), strict=True):
        assert line.startswith(message), mistake


def test_state_of_another_optimiser_is_refused() -> None:
    model, _, optimizer = parts()
    with pytest.raises(ValueError, match="another kind of optimiser"):
        optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())


@pytest.mark.filterwarnings("ignore")  # of torch, that this is a single process
@pytest.mark.parametrize("kind", [gn.GaussNewton, gn.HessianFree])
def test_resumed_by_distributed_checkpoint(kind, tmp_path) -> None:
    """The recipe of torch.distributed.checkpoint: a fresh optimiser is primed, then filled in."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def fresh(seed: int):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        criterion = nn.MSELoss()
        return model, criterion, kind(model, criterion, weight_decay=1e-4)

    model, criterion, optimizer = fresh(0)
    train(model, criterion, optimizer, *data(), 7)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(states, checkpoint_id=tmp_path / "saved", no_dist=True)
    again, other_criterion, resumed = fresh(1)
    states = dict(zip(("model", "optimizer"), get_state_dict(again, resumed), strict=True))
    checkpoint.load(states, checkpoint_id=tmp_path / "saved", no_dist=True)
    set_state_dict(
        again,
        resumed,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    expected = train(model, criterion, optimizer, *data(), 4)
    assert train(again, other_criterion, resumed, *data(), 4) == expected


def test_evaluation_mode_is_named_as_the_cause() -> None:
    model, criterion, optimizer = parts()
    x, y = data()
    model.eval()
    criterion(model(x), y).backward()
    with pytest.raises(gn.errors.RecordError, match="evaluation mode"):
        optimizer.step()
    model.train()
    optimizer.zero_grad()
    criterion(2 * model(x), y).backward()
    with pytest.raises(gn.errors.RecordError, match="outputs="):
        optimizer.step()
