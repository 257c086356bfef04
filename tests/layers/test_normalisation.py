"""Blocks of layers that normalise are exact, for any number of data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gaussnewton as gn
from gaussnewton.estimators import shared
from gaussnewton.layers import NormalisationRule, rule_for
from gaussnewton.layers.normalisation import normalised
from tests.problems import fit, relative

LAYERS = {
    "LayerNorm": (nn.LayerNorm(6), (6,)),
    "LayerNorm on sequences": (nn.LayerNorm(6), (3, 6)),
    "LayerNorm of two dimensions": (nn.LayerNorm((3, 2)), (4, 3, 2)),
    "LayerNorm without bias": (nn.LayerNorm(6, bias=False), (3, 6)),
    "RMSNorm": (nn.RMSNorm(6), (2, 6)),
    "GroupNorm": (nn.GroupNorm(2, 4), (4, 3, 2)),
    "InstanceNorm1d": (nn.InstanceNorm1d(3, affine=True), (3, 5)),
    "InstanceNorm2d": (nn.InstanceNorm2d(3, affine=True), (3, 2, 3)),
    "BatchNorm1d": (nn.BatchNorm1d(6), (6,)),
    "BatchNorm2d": (nn.BatchNorm2d(3), (3, 2, 3)),
}


def network(name: str, n: int):
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    size = torch.Size(shape).numel()
    model = nn.Sequential(
        nn.Linear(5, size),
        nn.Unflatten(1, shape),
        layer,
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(size, 3),
    ).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p))
        if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    model.eval()
    return model, (torch.randn(n, 5).double(), torch.randint(3, (n,)))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_blocks_are_exact(name: str, reduction: str) -> None:
    model, batch = network(name, 7)
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    found = gn.curvature(model, criterion, batch)["2"]
    assert isinstance(found, gn.DenseBlock)
    expected = gn.exact.gauss_newton_blocks(model, criterion, batch)["2"]
    assert relative(found.dense(), expected) < 1e-10


@pytest.mark.parametrize("name", ["LayerNorm on sequences", "BatchNorm2d"])
def test_the_diagonal_of_large_ones_is_exact(name: str, monkeypatch) -> None:
    monkeypatch.setattr(shared, "DENSE", 3)
    model, batch = network(name, 7)
    criterion = nn.CrossEntropyLoss()
    found = gn.curvature(model, criterion, batch)["2"]
    assert isinstance(found, gn.DiagonalBlock)
    expected = gn.exact.gauss_newton_blocks(model, criterion, batch)["2"]
    assert relative(found.dense().diagonal(), expected.diagonal()) < 1e-10


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_what_is_normalised_is_what_the_layer_scales(name: str, training: bool) -> None:
    layer, shape = LAYERS[name]
    layer = layer.double().train(training)
    x = torch.randn(4, *shape, dtype=torch.float64)
    with torch.no_grad():
        if layer.weight is not None:
            layer.weight.fill_(1)
        if getattr(layer, "bias", None) is not None:
            layer.bias.fill_(0)
        assert relative(normalised(layer, x), layer(x)) < 1e-12
    assert isinstance(rule_for(layer), NormalisationRule)


def test_trains_and_says_which_blocks() -> None:
    model, (x, y) = network("LayerNorm on sequences", 60)
    model.train()
    y = (x[:, 0] > 0).long()
    criterion = nn.CrossEntropyLoss()
    optimizer = gn.GaussNewton(model, criterion)
    losses = fit(optimizer, x, y, 12)
    assert losses[-1] < 0.3 * losses[0]
    said = optimizer.explain()
    assert "dense" in said
    assert "Kronecker" in said
