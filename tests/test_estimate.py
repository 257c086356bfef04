"""Batches, merging, and a model that is left as it was."""

from __future__ import annotations

import copy
import random

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import gaussnewton as gn
from tests.problems import LOSSES, network, relative


def cut(part: object, where: slice) -> object:
    return tuple(p[where] for p in part) if isinstance(part, tuple) else part[where]


@pytest.mark.parametrize("method", ["kflr", "hessian"])
@pytest.mark.parametrize(
    ("loss", "reduction"), [(name, r) for name, case in LOSSES.items() for r in case.reductions]
)
def test_batches_together_are_the_whole(loss: str, reduction: str, method: str) -> None:
    case = LOSSES[loss]
    width = case.outputs or 3
    net, criterion = network([3, 4, width]), case.make(reduction)
    x, y = torch.randn(9, 3).double(), case.targets(9, width)
    parts = [slice(0, 4), slice(4, 6), slice(6, 9)]
    whole = gn.curvature(net, criterion, (x, y), method=method)
    together = gn.curvature(net, criterion, [(x[p], cut(y, p)) for p in parts], method=method)
    assert together.data == 9
    for name in whole:
        if method == "kflr":
            assert relative(together[name].Q, whole[name].Q) < 1e-10
            assert relative(together[name].G, whole[name].G) < 1e-10
        else:
            assert relative(together[name].dense(), whole[name].dense()) < 1e-10


def test_data_loaders_lists_and_generators() -> None:
    net, criterion = network([3, 4, 2], dtype=torch.float32), nn.MSELoss()
    x, y = torch.randn(10, 3), torch.randn(10, 2)
    whole = gn.curvature(net, criterion, (x, y))["layers.0"].G
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    for data in (loader, iter(loader), [x, y], [(x[:4], y[:4]), [x[4:], y[4:]]]):
        torch.testing.assert_close(gn.curvature(net, criterion, data)["layers.0"].G, whole)


def test_progress_bar_shows_for_long_iterables_only(capsys, monkeypatch) -> None:
    net, criterion = network([3, 2], dtype=torch.float32), nn.MSELoss()
    batch = torch.randn(4, 3), torch.randn(4, 2)
    gn.curvature(net, criterion, [batch] * 3)
    assert capsys.readouterr().err == ""  # over before the bar's two seconds
    monkeypatch.setattr("gaussnewton.estimate._SECONDS_BEFORE_BAR", 0)
    gn.curvature(net, criterion, [batch] * 3)
    assert "3/3" in capsys.readouterr().err
    gn.curvature(net, criterion, [batch] * 3, progress=False)
    gn.curvature(net, criterion, batch)
    assert capsys.readouterr().err == ""


class Restless(nn.Module):
    """Changes buffers and draws random numbers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.norm = nn.BatchNorm1d(3, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        x = self.norm(x)
        random.random()
        return self.b(nn.functional.dropout(self.a(x).tanh(), 0.5, training=True))


@pytest.mark.parametrize("method", ["kflr", "kfra", "kfac", "hessian", "raise"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_nothing_of_the_model_is_changed(method: str, training: bool, grad_mode: bool) -> None:
    model, criterion = Restless().train(training), nn.MSELoss()
    model.b.eval()
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    criterion(model(x), y).backward()
    model.a.weight.register_hook(lambda g: g)
    before, grads = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    grad_objects = [id(p.grad) for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    state, python_state = torch.get_rng_state(), random.getstate()
    with torch.set_grad_enabled(grad_mode):
        if method == "raise":
            with pytest.raises(gn.errors.BatchError):
                gn.curvature(model, criterion, (x, y[:3]))
        else:
            gn.curvature(model, criterion, (x, y), method=method)
        assert torch.is_grad_enabled() is grad_mode
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert [id(p.grad) for p in model.parameters()] == grad_objects
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_works_under_inference_mode_and_with_its_tensors() -> None:
    model, (x, y) = nn.Linear(3, 2), (torch.randn(4, 3), torch.randn(4, 2))
    expected = gn.curvature(model, nn.MSELoss(), (x, y))[""].Q
    with torch.inference_mode():
        made = x * 1, y * 1
        torch.testing.assert_close(gn.curvature(model, nn.MSELoss(), made)[""].Q, expected)
    torch.testing.assert_close(gn.curvature(model, nn.MSELoss(), made)[""].Q, expected)


def test_loader_without_a_length() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(torch.ones(6, 3), torch.ones(6, 2), strict=True)

    assert gn.curvature(nn.Linear(3, 2), nn.MSELoss(), DataLoader(Stream(), 2)).data == 6


def test_collated_batches_with_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.layer(torch.cat([left, right], dim=1))

    model, left, right, y = Two(), torch.randn(5, 1), torch.randn(5, 3), torch.randn(5, 2)
    expected = gn.curvature(model, nn.MSELoss(), ((left, right), y))["layer"].Q
    for data in ([[left, right], y], [{"left": left, "right": right}, y], [[[left, right], y]]):
        torch.testing.assert_close(gn.curvature(model, nn.MSELoss(), data)["layer"].Q, expected)
    exact = gn.exact.gauss_newton_blocks(model, nn.MSELoss(), [[left, right], y])
    assert exact["layer"].shape == (10, 10)


def test_criterion_and_other_random_states_are_left_too() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, h: Tensor, y: Tensor) -> Tensor:
            self.calls += 1
            numpy.random.rand()
            return (h - y).square().mean()

    criterion, model = Counting(), nn.Linear(3, 2)
    state = numpy.random.get_state()[1].copy()
    gn.curvature(model, gn.Loss(criterion), (torch.randn(4, 3), torch.randn(4, 2)))
    assert criterion.calls == 0
    assert (numpy.random.get_state()[1] == state).all()


def test_hessian_keeps_its_memory_limit_for_many_data() -> None:
    """Outer products of inputs are formed for a part of the data at a time."""
    model, n = nn.Linear(100, 1, bias=False), 400
    x, y = torch.randn(n, 100), torch.randn(n, 1)
    sizes: list[int] = []
    original = Tensor.flatten

    def spy(self: Tensor, *args: int) -> Tensor:
        sizes.append(self.numel())
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "flatten", spy)
        H = gn.curvature(model, nn.MSELoss(), (x, y), method="hessian")[""].matrix
    torch.testing.assert_close(H, 2 * x.T @ x / n)
    assert max(sizes) <= x.numel()


def test_chunks_bound_the_memory_of_the_recursion() -> None:
    """The most rows held at once are those that fit in the workspace."""
    from gaussnewton.perdatum import Roots

    seen: list[int] = []
    original = Roots.__init__

    def spy(self: Roots, rows: Tensor) -> None:
        seen.append(rows.numel() * rows.element_size())
        original(self, rows)

    net = network([4, 30, 20, 25], dtype=torch.float32)
    batch = torch.randn(64, 4), torch.rand(64, 25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Roots, "__init__", spy)
        gn.curvature(net, nn.BCEWithLogitsLoss(), batch, method=gn.KFLR(workspace=20_000))
    assert seen
    assert max(seen) <= 20_000
