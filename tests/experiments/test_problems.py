"""The paper's problems."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import gaussnewton as gn
from gaussnewton.errors import ExperimentError
from gaussnewton.experiments.data import digits
from gaussnewton.experiments.data.dataset import DataSet
from gaussnewton.experiments.problems import PROBLEMS, problem


@pytest.mark.parametrize(("name", "pixels"), [("curves", 784), ("mnist", 784), ("faces", 625)])
def test_the_autoencoders_are_the_papers(name: str, pixels: int) -> None:
    network = problem(name).network(seed=0)
    shapes = [tuple(layer.weight.shape) for layer in network if isinstance(layer, nn.Linear)]
    widths = [pixels, 1000, 500, 250, 30, 250, 500, 1000, pixels]
    assert shapes == [(widths[i + 1], widths[i]) for i in range(8)]
    assert [type(layer) for layer in network[1::2]] == [nn.Tanh] * 7
    assert problem(name).batch == 1000
    budget = (160_000, 20_000) if name == "faces" else (40_000, 5_000)
    assert (problem(name).first_order_updates, problem(name).second_order_updates) == budget


def test_the_objective_is_summed_over_pixels() -> None:
    outputs, targets = torch.randn(5, 784), torch.rand(5, 784)
    p = outputs.sigmoid()
    expected = -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(1).mean()
    mnist = problem("mnist")
    value = mnist.scale * mnist.criterion()(outputs, targets)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    faces, error = problem("faces"), (outputs - targets)[:, :625]
    value = faces.scale * faces.criterion()(outputs[:, :625], targets[:, :625])
    assert value.item() == pytest.approx(error.square().sum(1).mean().item(), rel=1e-5)


def test_initialisation_is_glorots_and_depends_on_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (problem("tiny").network(seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(first[0], nn.Linear)
    bound = math.sqrt(6 / (196 + 64))
    assert 0.98 * bound < first[0].weight.abs().max() <= bound
    assert not first[0].bias.any()
    for p, q, r in zip(*(m.parameters() for m in (first, again, other)), strict=True):
        assert torch.equal(p, q)
        assert p.ndim == 1 or not torch.equal(p, r)


def test_mixture_labels_are_parity(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.tensor([5, 0, 4, 1])
    fake = DataSet("mnist", torch.rand(4, 784), labels)
    monkeypatch.setattr("gaussnewton.experiments.problems.load", lambda *_: fake)
    x, y = problem("mixture").data(None)
    assert x is fake.images
    assert y is not None
    assert y.tolist() == [1, 0, 0, 1]
    criterion = problem("mixture").criterion()
    assert isinstance(criterion, gn.BinaryMixtureLoss)
    assert criterion(problem("mixture").network(0)(x), y).isfinite()


def test_data_come_from_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=digits.IMAGES.file):
        problem("mixture").data(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"olivettifaces\.mat"):
        problem("faces").data(tmp_path)


def test_tiny_data_fit_its_network() -> None:
    tiny = problem("tiny")
    x, y = tiny.data(None)
    assert y is None
    assert x.shape == (1000, 196)
    assert tiny.network(0)(x[:2]).shape == (2, 196)
    assert 0 <= x.min() < 0.01
    assert 0.5 < x.max() <= 1


def test_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(
        ExperimentError, match=f"no problem 'cifar'. There are {', '.join(PROBLEMS)}"
    ):
        problem("cifar")
