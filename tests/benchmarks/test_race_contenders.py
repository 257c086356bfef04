"""Contenders train on the same batches, judge by the same loss, and are timed alone."""

import numpy as np
import pytest
import torch
from race.contender import Means, TorchContender
from race.jax_contender import layers_of, orders, parameters_of
from race.optimizers import TORCHS_OWN, build, muons_precision, orthogonal_in_float32
from race.settings import MEMORIES
from race.tasks import TASKS, Data, Task
from torch import nn
from torch.optim import _muon as muon_of_torch

from gaussnewton.averaging import update_average
from gaussnewton.experiments.data import Batches


def small(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


TASK = Task("small", small, nn.BCEWithLogitsLoss, 6.0, "", lambda _: None, 10)


def data():
    x = torch.rand(60, 6, generator=torch.Generator().manual_seed(3))
    return Data(x, None, torch.arange(40))


@pytest.mark.parametrize("runner", ["default", "paper", "adam", "nadamw", "nesterov", "muon"])
def test_losses_fall_and_judging_changes_nothing(runner):
    torch.manual_seed(0)
    made = TorchContender(TASK, data(), runner, {"rate": 2.0**-6, "decay": 1.0}, 0, 60.0)
    x, _ = data().judged()
    first = 6.0 * nn.functional.binary_cross_entropy_with_logits(small(0)(x), x).item()
    assert made.evaluate()[0] == pytest.approx(first, rel=1e-5)
    for _ in range(60):
        made.advance(1e-9)  # one update
        before = [p.detach().clone() for p in made.model.parameters()]
        loss, _ = made.evaluate()
        assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))
    assert made.updates == 60
    assert loss < 0.99 * first


def test_jax_gets_the_batches_that_torch_gets():
    given, batches = orders(60, seed=5), Batches(torch.arange(60), size=25, seed=5)
    for _ in range(3):  # epochs of two batches; the rest of ten is left out
        order = next(given)
        assert torch.equal(next(batches)[0], order[:25])
        assert torch.equal(next(batches)[0], order[25:50])


def test_jax_gets_the_parameters_that_torch_has():
    model = TASKS["cnn"].network(1)
    kept = parameters_of(model)
    x = torch.rand(3, 1, 28, 28)
    windows = x.unfold(2, 5, 1).unfold(3, 5, 1)[:, 0]  # [n, height, width, 5, 5]
    expected = np.einsum("nhwab,abo->nhwo", windows.numpy(), kept["0"][:, :, 0]) + kept["1"]
    found = model[0](x).permute(0, 2, 3, 1)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    assert kept["4"].shape == (256, 64)
    assert [layer["kind"] for layer in layers_of(model)][:3] == ["Conv2d", "ReLU", "MaxPool2d"]


def test_means_are_those_of_the_paper():
    p = torch.zeros(3)
    means, slow = Means([p]), dict.fromkeys(MEMORIES)
    for t in range(1, 40):
        p += t
        means.update(t)
        for memory in MEMORIES:
            slow[memory] = update_average(slow[memory], p, t, memory)
    for memory in MEMORIES:
        torch.testing.assert_close(means.kept[memory][0], slow[memory])


def test_muon_in_float32_is_muon():
    torch.manual_seed(0)
    for shape in ((20, 30), (30, 20)):
        gradient, coefficients = torch.randn(shape), (3.4445, -4.7750, 2.0315)
        theirs = TORCHS_OWN(gradient.clone(), coefficients, 5, 1e-7).float()
        ours = orthogonal_in_float32(gradient, coefficients, 5, 1e-7)
        assert (ours - theirs).norm() < 0.02 * theirs.norm()  # bfloat16 has three digits


def test_muon_leaves_what_is_no_matrix_to_adamw():
    model = TASKS["cnn"].network(0)
    muon, adamw = build("muon", model, nn.CrossEntropyLoss(), {"rate": 0.01})
    sizes = [p.ndim for group in muon.param_groups for p in group["params"]]
    others = [p.ndim for group in adamw.param_groups for p in group["params"]]
    assert sizes == [2, 2]
    assert sorted(others) == [1, 1, 1, 1, 4, 4]
    assert len(sizes) + len(others) == len(list(model.parameters()))


def test_muon_runs_in_the_precision_that_is_faster_here_and_says_so():
    made = TorchContender(TASK, data(), "muon", {"rate": 0.01, "decay": 1.0}, 0, 60.0)
    assert made.versions == {"iterations of Muon": muons_precision()}
    taken = muon_of_torch._zeropower_via_newtonschulz
    wanted = {"bfloat16": TORCHS_OWN, "float32": orthogonal_in_float32}
    assert taken is wanted[muons_precision()]
