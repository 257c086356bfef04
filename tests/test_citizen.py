"""GaussNewton as a good citizen of torch.optim: one test for each promise."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from tests.problems import relative


def parts(seed: int = 0, **settings) -> tuple[nn.Sequential, nn.Module, gn.GaussNewton]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    criterion = nn.MSELoss()
    return model, criterion, gn.GaussNewton(model, criterion, **settings)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 20, 4, generator=generator, dtype=torch.float64)
    return [(a, torch.stack([a[:, 0] * a[:, 1], a.sum(1).sin()], 1)) for a in x]


def step(model: nn.Module, criterion: nn.Module, optimizer: gn.GaussNewton, batch) -> float:
    optimizer.zero_grad()
    loss = criterion(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.item()


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_lr_scales_the_step_and_schedulers_work() -> None:
    moved = []
    for lr in (1.0, 0.5):
        model, criterion, optimizer = parts(lr=lr, damping=gn.Damping(tau=0.1))
        before = parameters(model)
        step(model, criterion, optimizer, batches(1)[0])
        moved.append([q - p for p, q in zip(before, parameters(model), strict=True)])
    for one, half in zip(*moved, strict=True):
        torch.testing.assert_close(half, one / 2)
    model, criterion, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    for batch in batches(4):
        step(model, criterion, optimizer, batch)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_parameter_groups_with_their_own_rates() -> None:
    torch.manual_seed(0)
    model, criterion = (
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double(),
        nn.MSELoss(),
    )
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer = gn.GaussNewton(model, criterion, groups)
    before = parameters(model)
    step(model, criterion, optimizer, batches(1)[0])
    assert same(before[:2], parameters(model)[:2])
    assert not torch.equal(before[2], model[2].weight)


def test_add_param_group_after_steps_and_frozen_parameters() -> None:
    torch.manual_seed(0)
    model, criterion = (
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double(),
        nn.MSELoss(),
    )
    model[0].requires_grad_(False)
    optimizer, data = gn.GaussNewton(model, criterion), batches(6)
    before = parameters(model)
    for batch in data[:3]:
        step(model, criterion, optimizer, batch)
    assert same(before[:2], parameters(model)[:2])
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    for batch in data[3:]:
        step(model, criterion, optimizer, batch)
    assert not torch.equal(before[0], model[0].weight)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_both_ways(to_none: bool) -> None:
    runs = []
    for _ in range(2):
        model, criterion, optimizer = parts()
        for x, y in batches(4):
            optimizer.zero_grad(set_to_none=to_none)
            criterion(model(x), y).backward()
            optimizer.step()
        runs.append(parameters(model))
    assert same(*runs)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_reset_through_the_model(to_none: bool) -> None:
    model, criterion, optimizer = parts()
    twin, _, other = parts()
    a, b = batches(2)
    criterion(model(a[0]), a[1]).backward()
    model.zero_grad(set_to_none=to_none)  # the optimiser is not told
    criterion(model(b[0]), b[1]).backward()
    optimizer.step()
    step(twin, other.criterion, other, b)
    assert same(parameters(model), parameters(twin))


def test_closures() -> None:
    model, criterion, optimizer = parts()
    twin, _, other = parts()
    for x, y in batches(3):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            return loss

        value = optimizer.step(closure)
        assert value.item() == pytest.approx(step(twin, other.criterion, other, (x, y)))
    assert same(parameters(model), parameters(twin))


def test_gradient_accumulation_is_the_whole_batch() -> None:
    settings = {"curvature": "kflr", "step_size": gn.StepSize(part=1.0)}
    model, criterion, optimizer = parts(**settings)
    twin, _, other = parts(**settings)
    for x, y in batches(4):
        optimizer.zero_grad()
        for part in (slice(0, 5), slice(5, 20)):
            share = len(x[part]) / len(x)
            (share * criterion(model(x[part]), y[part])).backward()
        optimizer.step()
        step(twin, other.criterion, other, (x, y))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert relative(p, q) < 1e-8


def test_evaluations_and_extra_passes_do_not_disturb() -> None:
    model, criterion, optimizer = parts()
    twin, _, other = parts()
    for x, y in batches(4):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        model.eval()
        criterion(model(x + 1), y)
        with torch.no_grad():
            criterion(model(x + 2), y)
        model.train()
        criterion(model(x + 3), y)  # with gradients, but never differentiated
        model(x + 4)
        optimizer.step()
        step(twin, other.criterion, other, (x, y))
    assert same(parameters(model), parameters(twin))


@pytest.mark.parametrize("curvature", ["kfra", "kfac"])
@pytest.mark.parametrize("after", [3, 7, 9, 10, 11, 13, 18])
def test_saved_and_resumed_bit_for_bit(curvature: str, after: int) -> None:
    """Before and after the updates that each have fresh curvature, and with γ on its way."""
    step_size = gn.StepSize(least=5, ask=3, growth=0.3)
    data, settings = batches(20), {"curvature": curvature, "step_size": step_size}
    model, criterion, optimizer = parts(**settings)
    for batch in data[:after]:
        step(model, criterion, optimizer, batch)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, same_criterion, resumed = parts(seed=9, **settings)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for batch in data[after:]:
        first = step(model, criterion, optimizer, batch)
        assert first == step(again, same_criterion, resumed, batch)
        kinds = [[type(i) for i in each._inverses.values()] for each in (optimizer, resumed)]
        assert kinds[0] == kinds[1]
    assert same(parameters(model), parameters(again))
    found, expected = resumed.diagnostics, optimizer.diagnostics
    assert set(found.pop("seconds")) == set(expected.pop("seconds"))
    assert found == expected


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alike_and_apart(how: str) -> None:
    data = batches(10)
    model, criterion, optimizer = parts(curvature="kfac")
    for batch in data[:4]:
        step(model, criterion, optimizer, batch)
    together = (model, criterion, optimizer)
    copied = copy.deepcopy(together) if how == "deepcopy" else pickle.loads(pickle.dumps(together))
    for batch in data[4:]:
        assert step(*copied, batch) == step(model, criterion, optimizer, batch)
    assert same(parameters(model), parameters(copied[0]))


def test_copy_of_the_model_alone_is_not_watched() -> None:
    model, criterion, optimizer = parts()
    alone = copy.deepcopy(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    (x, y) = batches(1)[0]
    criterion(alone(x), y).backward()
    criterion(averaged(x), y).backward()
    assert not optimizer._observer.observations
    pickle.loads(pickle.dumps(model))


def test_hooks_hold_nothing_alive() -> None:
    model, criterion, optimizer = parts()
    del optimizer
    gc.collect()
    x, y = batches(1)[0]
    criterion(model(x), y).backward()  # the hooks are inert now
    second = gn.GaussNewton(model, criterion)
    step(model, criterion, second, (x, y))


def test_gradients_may_be_reset_after_the_forward_pass() -> None:
    """The other usual order: model, zero_grad, backward, step."""
    model, criterion, optimizer = parts()
    twin, same_criterion, other = parts()
    for batch in batches(4):
        first = step(model, criterion, optimizer, batch)
        loss = same_criterion(twin(batch[0]), batch[1])
        other.zero_grad()
        loss.backward()
        other.step()
        assert loss.item() == first
    assert same(parameters(model), parameters(twin))


@pytest.mark.parametrize("stepped", [True, False], ids=["stepped", "reset"])
def test_a_pass_is_let_go_of(stepped: bool) -> None:
    """Nothing of a forward pass is kept, not even in a cycle that only the collector ends."""
    model, criterion, optimizer = parts()
    gc.disable()
    try:
        x, y = (part.clone() for part in batches(1)[0])
        seen = weakref.ref(x)
        loss = criterion(model(x), y)
        loss.backward()
        del x, y, loss
        if stepped:
            optimizer.step()
        else:
            optimizer.zero_grad()
            step(model, criterion, optimizer, batches(1)[0])
        assert seen() is None
    finally:
        gc.enable()


def test_hooks_of_torch_optim() -> None:
    model, criterion, optimizer = parts()
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    step(model, criterion, optimizer, batches(1)[0])
    optimizer.state_dict()
    assert seen == ["before", "after", "saved"]


def test_a_load_hook_may_exchange_the_state() -> None:
    model, criterion, optimizer = parts()
    step(model, criterion, optimizer, batches(1)[0])
    state = optimizer.state_dict()
    exchanged = copy.deepcopy(state)
    exchanged["state"][0]["Q"] *= 2
    _, _, other = parts()
    other.register_load_state_dict_pre_hook(lambda *_: exchanged)
    other.load_state_dict(state)
    assert torch.equal(other.state_dict()["state"][0]["Q"], 2 * state["state"][0]["Q"])


def test_priming_by_zero_gradients_changes_nothing() -> None:
    model, _, optimizer = parts()
    before = parameters(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert same(before, parameters(model))


def test_gradients_without_a_forward_pass_are_refused() -> None:
    model, _, optimizer = parts()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(gn.errors.RecordError, match="no forward pass that made them"):
        optimizer.step()


def test_models_that_draw_random_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 2)).double()
    criterion = nn.MSELoss()
    optimizer = gn.GaussNewton(model, criterion, damping=gn.Damping(tau=1.0, tau_interval=1))
    for batch in batches(10):
        optimizer.zero_grad()
        loss = criterion(model(batch[0]), batch[1])
        state = torch.get_rng_state()
        loss.backward()
        optimizer.step()
        assert torch.equal(state, torch.get_rng_state())  # the step draws nothing
        # The same mask before and after, so a damped step is as good as predicted.
        assert optimizer.diagnostics["rho"] > 0.3


def test_bfloat16_model_with_float32_factors() -> None:
    torch.manual_seed(0)
    model, criterion = (
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).bfloat16(),
        nn.MSELoss(),
    )
    optimizer = gn.GaussNewton(model, criterion)
    losses = [
        step(model, criterion, optimizer, (x.bfloat16(), y.bfloat16())) for x, y in batches(10)
    ]
    assert losses[-1] < losses[0]
    state = optimizer.state[model[0].weight]
    assert state["Q"].dtype == state["G"].dtype == torch.float32
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert optimizer.state[model[0].weight]["Q"].dtype == torch.float32


def test_a_step_taken_back_in_low_precision_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).bfloat16()
    criterion = nn.MSELoss()
    optimizer = gn.GaussNewton(model, criterion)
    low = [(x.bfloat16(), y.bfloat16()) for x, y in batches(4)]
    for batch in low[:2]:
        step(model, criterion, optimizer, batch)
    before = parameters(model)
    step(model, criterion, optimizer, low[2])
    with torch.no_grad():  # as if that step had been far too long
        for p, start in zip(model.parameters(), before, strict=True):
            p.add_(p - start, alpha=1e4)
    step(model, criterion, optimizer, low[3])
    assert optimizer.diagnostics["refused"] == 1
    assert same(parameters(model), before)


def test_averaged_parameters() -> None:
    model, criterion, optimizer = parts()
    path = []
    for batch in batches(5):
        step(model, criterion, optimizer, batch)
        path.append(model[0].weight.detach().clone())
    mean = torch.stack(path).mean(0)
    torch.testing.assert_close(optimizer.averaged_parameters()["0.weight"], mean)
    with optimizer.averaged():
        torch.testing.assert_close(model[0].weight.detach(), mean)
    assert torch.equal(model[0].weight, path[-1])
    with pytest.raises(ZeroDivisionError), optimizer.averaged():
        _ = 1 / 0
    assert torch.equal(model[0].weight, path[-1])
    model.load_state_dict(optimizer.averaged_parameters())


def test_general_functions_between_layers() -> None:
    """The graph is gone after backward; the pass is evaluated again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Softmax(dim=1), nn.Linear(6, 2)).double()
    criterion = nn.MSELoss()
    optimizer = gn.GaussNewton(model, criterion)
    data = batches(1) * 15
    losses = [step(model, criterion, optimizer, batch) for batch in data]
    assert losses[-1] < 0.7 * losses[0]


def scaled_step(model, criterion, optimizer, scaler, batch, unscale: bool = False) -> None:
    optimizer.zero_grad()
    scaler.scale(criterion(model(batch[0]), batch[1])).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_changes_nothing(unscale: bool) -> None:
    """A power of two scales exactly, so the steps are the same bit for bit."""
    model, criterion, optimizer = parts()
    twin, same_criterion, other = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    if unscale:
        with pytest.raises(gn.errors.RecordError, match="grad_scaler = scaler"):
            scaled_step(twin, same_criterion, other, scaler, batches(1)[0], unscale=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        other.grad_scaler = scaler
    for batch in batches(6):
        step(model, criterion, optimizer, batch)
        scaled_step(twin, same_criterion, other, scaler, batch, unscale)
    assert same(parameters(model), parameters(twin))
    assert other.diagnostics["tau"] == optimizer.diagnostics["tau"]


def test_overflow_under_a_grad_scaler_leaves_no_trace() -> None:
    model, criterion, optimizer = parts()
    twin, same_criterion, other = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    data = batches(4)
    for i, batch in enumerate(data):
        step(model, criterion, optimizer, batch)
        scaled_step(twin, same_criterion, other, scaler, batch)
        if i == 1:
            spoilt = (torch.full_like(batch[0], torch.inf), batch[1])
            for _ in range(12):  # more than the guard's patience: the scaler looks after these
                scaled_step(twin, same_criterion, other, scaler, spoilt)
            assert other.diagnostics["skipped"] == 12
    assert scaler.get_scale() < 2.0**10
    assert same(parameters(model), parameters(twin))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        for key in ("average", "Q", "G", "start"):
            if key in optimizer.state[p]:
                assert torch.equal(optimizer.state[p][key], other.state[q][key]), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("curvature", ["kflr", "kfra", "kfac"])
@pytest.mark.parametrize("all_inside", [False, True])
def test_autocast(dtype: torch.dtype, curvature: str, all_inside: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    criterion = nn.MSELoss()
    optimizer = gn.GaussNewton(model, criterion, curvature=curvature)
    x, y = (part.float() for part in batches(1)[0])
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = criterion(model(x), y)
        loss.backward()
        observed = optimizer._observer.observations[-1]
        assert torch.equal(optimizer._observer.evaluate(observed), loss.detach())
        with torch.autocast("cpu", dtype=dtype, enabled=all_inside):
            optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(s["Q"].dtype == torch.float32 for s in optimizer.state.values() if "Q" in s)


def compiled_in_some_way(way: str) -> tuple[nn.Module, nn.Module, nn.Module, gn.GaussNewton]:
    """What to call, the model, the criterion and the optimiser."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    if way == "wrapped":
        model = torch.compile(model, backend="aot_eager")
    elif way == "in place":
        model.compile(backend="aot_eager")
    elif way == "a part":
        model[2] = torch.compile(model[2], backend="aot_eager")
    criterion = nn.MSELoss()
    optimizer = gn.GaussNewton(model, criterion)
    called = model
    if way == "in place, later":
        model.compile(backend="aot_eager")
    elif way == "wrapped, later":
        called = torch.compile(model, backend="aot_eager")
    return called, model, criterion, optimizer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.parametrize(
    "way", ["wrapped", "in place", "a part", "in place, later", "wrapped, later"]
)
def test_compiled_models_train_the_same(way: str) -> None:
    torch.compiler.reset()
    plain, plain_criterion, expected = parts()
    called, model, criterion, optimizer = compiled_in_some_way(way)
    for batch in batches(6):
        first = step(plain, plain_criterion, expected, batch)
        optimizer.zero_grad()
        loss = criterion(called(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(first, rel=1e-10)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert relative(q, p) < 1e-9
    assert optimizer.diagnostics["t"] == 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_curvature_of_a_compiled_model() -> None:
    torch.compiler.reset()
    model, criterion, _ = parts()
    batch = batches(1)[0]
    expected = gn.curvature(model, criterion, batch, method="kflr")
    found = gn.curvature(torch.compile(model, backend="aot_eager"), criterion, batch, method="kflr")
    assert list(found) == list(expected)
    for a, b in zip(expected.values(), found.values(), strict=True):
        assert relative(b.Q, a.Q) < 1e-12
        assert relative(b.G, a.G) < 1e-12
