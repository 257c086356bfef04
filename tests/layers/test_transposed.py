"""Transposed convolutions: positions and gradients are those of their matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.layers import rule_for
from tests.problems import relative

LAYERS = {
    "1d": (nn.ConvTranspose1d(3, 4, 3), (5, 3, 6)),
    "1d, as many out as in": (nn.ConvTranspose1d(3, 3, 2, stride=2), (5, 3, 4)),
    "1d, no bias": (nn.ConvTranspose1d(2, 3, 2, bias=False), (4, 2, 5)),
    "2d": (nn.ConvTranspose2d(3, 2, (2, 3)), (2, 3, 4, 5)),
    "2d, all options": (
        nn.ConvTranspose2d(4, 6, 3, (2, 3), 1, (1, 2), groups=2, dilation=(2, 1)),
        (2, 4, 4, 3),
    ),
    "3d": (nn.ConvTranspose3d(2, 3, 2, stride=(1, 2, 1)), (2, 2, 3, 2, 3)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    return layer.double(), torch.randn(shape).double()


@pytest.mark.parametrize("name", LAYERS)
def test_positions_times_gradients_are_the_gradient(name: str) -> None:
    layer, x = made(name)
    y = layer(x)
    g = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, layer.weight, g)
    rule = rule_for(layer, "weight")
    a = rule.positions(layer, x)
    back = rule.gradients(layer, g.unsqueeze(0))[0]
    found = torch.einsum("nrgi,nrgo->gio", a, back).reshape(expected.shape)
    assert relative(found, expected) < 1e-12


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("method", ["kflr", "kfac"])
def test_blocks(name: str, method: str) -> None:
    layer, x = made(name)
    model = nn.Sequential(layer, nn.Tanh())
    batch = (x, torch.randn_like(layer(x)))
    criterion = nn.MSELoss(reduction="sum")
    found = gn.curvature(model, criterion, batch, method=method)
    exact = gn.exact.gauss_newton_blocks(model, criterion, batch)
    weight = "0.weight" if layer.bias is not None else "0"
    assert found[weight].rows == x.shape[1]
    assert 0.5 < float(found[weight].trace() / exact[weight].trace()) < 2
    if layer.bias is not None and method == "kflr":
        assert relative(found["0.bias"].dense(), exact["0.bias"]) < 1e-10


def test_one_pixel_of_one_datum_is_exact() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(3, 2, 2), nn.Tanh()).double()
    x = torch.randn(1, 3, 1, 1).double()
    batch = (x, torch.randn_like(model(x)))
    found = gn.curvature(model, nn.MSELoss(), batch)
    exact = gn.exact.gauss_newton_blocks(model, nn.MSELoss(), batch)
    assert relative(found["0.weight"].dense(), exact["0.weight"]) < 1e-10


def test_only_the_bias_is_trained() -> None:
    layer, x = made("2d")
    layer.weight.requires_grad_(False)
    model = nn.Sequential(layer, nn.Tanh())
    batch = (x, torch.randn_like(layer(x)))
    found = gn.curvature(model, nn.MSELoss(), batch)
    exact = gn.exact.gauss_newton_blocks(model, nn.MSELoss(), batch)
    layer.weight.requires_grad_(True)
    assert relative(found["0"].dense(), exact["0"]) < 1e-10
