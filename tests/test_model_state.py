from __future__ import annotations

import copy
import random as python_random

import pytest
import torch
from torch import nn

from gaussnewton import exact
from gaussnewton.model_state import unchanged
from tests.exact.cases import CLASSES, F64, N, random

X = random(N, 3, seed=1)
FUNCTIONS = [
    "hessian",
    "hessian_blocks",
    "gauss_newton",
    "gauss_newton_blocks",
    "fisher",
    "fisher_blocks",
    "hessian_product",
    "gauss_newton_product",
    "fisher_product",
    "preactivation_gauss_newton",
    "preactivation_hessian",
]


class Restless(nn.Module):
    """A model that changes all it can in a forward pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Linear(4, 2)
        )
        self.register_buffer("calls", torch.zeros(2))
        self.twin = nn.Module()
        self.twin.register_buffer("calls", self.calls)

    def forward(self, x):
        self.calls += python_random.random() + torch.rand(2)
        self.register_buffer("late", torch.ones(1))
        return self.layers(x)


def loud(*_):
    raise RuntimeError("criterion")


def everything(model):
    """All that must be as it was: values, identities, hooks and random states."""
    return {
        "values": copy.deepcopy(model.state_dict()),
        "objects": {key: id(value) for key, value in model.named_buffers(remove_duplicate=False)},
        "modes": [m.training for m in model.modules()],
        "gradients": [(id(p.grad), p.grad.sum().item()) for p in model.parameters()],
        "needs": [p.requires_grad for p in model.parameters()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in model.modules()
        ],
        "torch": torch.get_rng_state().tolist(),
        "python": python_random.getstate(),
        "grad_mode": torch.is_grad_enabled(),
    }


def compare(before, after):
    values, others = before.pop("values"), after.pop("values")
    assert values.keys() == others.keys()
    assert all(torch.equal(values[key], others[key]) for key in values)
    for key in before:
        assert before[key] == after[key], key


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Restless().to(F64)
        model.twin.calls = model.calls
        model.layers[1].eval()  # a mode of its own
        model.layers[1].train(True)
        model.layers[2].train(True)
        model.layers[0].eval()
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    model.layers[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), loud])
def test_model_and_random_state_are_left_as_they_were(name, criterion, model):
    function, before = getattr(exact, name), everything(model)
    if criterion is loud:
        with pytest.raises(Exception, match=r"criterion|loud"):
            function(model, criterion, (X, CLASSES))
    else:
        result = function(model, criterion, (X, CLASSES))
        if callable(result):
            result(random(12 + 4 + 8 + 10))
    compare(before, everything(model))


def test_an_error_in_the_forward_pass_leaves_it_too(model):
    model.layers[3] = nn.Linear(7, 2, dtype=F64)  # does not fit
    for p in model.layers[3].parameters():
        p.grad = torch.zeros_like(p)
    before = everything(model)
    for name in FUNCTIONS:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            getattr(exact, name)(model, nn.CrossEntropyLoss(), (X, CLASSES))
    compare(before, everything(model))


def test_the_forward_pass_does_change_the_model_without_the_guard(model):
    """Or the tests above would show nothing."""
    before = everything(model)
    model(X)
    after = everything(model)
    assert before["values"].keys() != after["values"].keys()
    assert before["torch"] != after["torch"]
    assert not torch.equal(before["values"]["calls"], after["values"]["calls"])
    running = "layers.1.running_mean"
    assert not torch.equal(before["values"][running], after["values"][running])


def test_modes_and_gradients_changed_inside_are_put_back(model):
    before = everything(model)
    with unchanged(model):
        model.eval()
        model(X).sum().backward()
        model.zero_grad()
    after = everything(model)
    compare(before, after)


def test_shared_buffers_stay_shared_inside(model):
    with unchanged(model):
        model(X)
        assert model.calls is model.twin.calls
        assert model.calls.any()
    assert not model.calls.any()


def test_random_layers_see_the_random_state_of_the_caller(model):
    """The same dropout mask in every function, and the one that the caller's next call sees."""
    torch.manual_seed(1)
    first = exact.gauss_newton(model, nn.CrossEntropyLoss(), (X, CLASSES))
    second = exact.gauss_newton(model, nn.CrossEntropyLoss(), (X, CLASSES))
    torch.manual_seed(2)
    other = exact.gauss_newton(model, nn.CrossEntropyLoss(), (X, CLASSES))
    assert torch.equal(first, second)
    assert not torch.allclose(first, other, rtol=1e-2)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_off(off, model):
    model.eval()
    expected = exact.hessian(model, nn.CrossEntropyLoss(), (X, CLASSES))
    with off():
        result = exact.hessian(model, nn.CrossEntropyLoss(), (X, CLASSES))
        assert not torch.is_grad_enabled()
    assert torch.equal(result, expected)
