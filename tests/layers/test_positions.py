"""Positions and gradients of a layer are those of its matrix: outputs and gradients come out."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaussnewton.layers import rule_for
from gaussnewton.layers.convolution import patches
from gaussnewton.parameters import Group
from tests.problems import relative

CONVOLUTIONS = {
    "1d": (nn.Conv1d(3, 4, 3), (5, 3, 9)),
    "1d, no bias": (nn.Conv1d(3, 4, 2, bias=False), (5, 3, 9)),
    "1d, circular": (nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), (2, 2, 7)),
    "2d": (nn.Conv2d(3, 4, 3), (2, 3, 6, 7)),
    "2d, padded": (nn.Conv2d(3, 4, 3, padding=(1, 2)), (2, 3, 6, 7)),
    "2d, same": (nn.Conv2d(3, 4, (3, 4), padding="same"), (2, 3, 6, 7)),
    "2d, valid": (nn.Conv2d(3, 4, 3, padding="valid"), (2, 3, 6, 7)),
    "2d, stride and dilation": (nn.Conv2d(2, 4, (2, 3), (2, 1), 1, (1, 2)), (3, 2, 8, 9)),
    "2d, reflect": (nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), (2, 2, 5, 6)),
    "2d, replicate": (nn.Conv2d(2, 4, 3, padding=2, padding_mode="replicate"), (2, 2, 5, 6)),
    "2d, groups": (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 6, 5)),
    "2d, depthwise": (nn.Conv2d(4, 8, 3, groups=4, bias=False), (2, 4, 6, 5)),
    "2d, groups and more": (nn.Conv2d(4, 6, 2, 2, 1, 2, groups=2), (3, 4, 7, 8)),
    "3d": (nn.Conv3d(2, 4, (1, 2, 3), padding=1), (2, 2, 4, 5, 4)),
    "3d, groups": (nn.Conv3d(2, 4, 2, stride=(1, 2, 1), groups=2), (2, 2, 4, 5, 4)),
}
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
LINEAR = {
    "rows": (nn.Linear(3, 4), (5, 3)),
    "sequences": (nn.Linear(3, 4), (5, 2, 3)),
    "images": (nn.Linear(3, 2, bias=False), (5, 2, 4, 3)),
}
LAYERS = CONVOLUTIONS | LINEAR
FEW_LINES = {
    "one place": (nn.Conv2d(2, 3, 3), (4, 2, 3, 5)),
    "fewer lines than the kernel has": (nn.Conv2d(2, 3, (5, 2), padding=(3, 0)), (4, 2, 2, 5)),
    "mostly padding": (nn.Conv1d(2, 3, 3, padding=5, dilation=2), (4, 2, 3)),
    "padding wider than the kernel": (nn.Conv2d(2, 3, 2, padding=4), (2, 2, 3, 3)),
    "dilated lines": (nn.Conv2d(3, 4, 3, dilation=(2, 1), padding=(2, 1)), (3, 3, 9, 6)),
}


def parts(name: str) -> tuple[nn.Module, Tensor, Group]:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    layer = layer.double()
    return layer, torch.randn(shape).double(), Group.of("", dict(layer.named_parameters()))


@pytest.mark.parametrize("name", LAYERS)
def test_the_matrix_times_the_positions_are_the_outputs(name: str) -> None:
    layer, x, group = parts(name)
    rule = rule_for(layer)
    output = layer(x).detach()
    a = rule.positions(layer, x)
    W = group.matrix(dict(layer.named_parameters())).detach().unflatten(0, (a.shape[2], -1))
    expected = rule.gradients(layer, output.unsqueeze(0))[0]  # sorts outputs in the same way
    assert relative(torch.einsum("nrgc,goc->nrgo", a, W), expected) < 1e-12


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_times_positions_are_the_gradient(name: str) -> None:
    layer, x, group = parts(name)
    rule = rule_for(layer)
    output = layer(x)
    v = torch.randn_like(output)
    named = dict(layer.named_parameters())
    gradient = dict(zip(named, torch.autograd.grad(output, list(named.values()), v), strict=True))
    g, a = rule.gradients(layer, v.unsqueeze(0))[0], rule.positions(layer, x)
    found = torch.einsum("nrgo,nrgc->goc", g, a).flatten(0, 1)
    assert relative(found, group.matrix(gradient)) < 1e-12


@pytest.mark.parametrize("frozen", [None, "bias", "weight"])
@pytest.mark.parametrize("name", [*LAYERS, *FEW_LINES])
def test_second_moments_are_those_of_the_positions(name: str, frozen: str | None) -> None:
    torch.manual_seed(0)
    layer, shape = (LAYERS | FEW_LINES)[name]
    layer, x = copy.deepcopy(layer).double(), torch.randn(shape).double()
    own = getattr(layer, frozen) if frozen else None
    if own is not None:
        own.requires_grad_(False)
    if not any(p.requires_grad for p in layer.parameters()):
        return  # it has no matrix at all
    rule = rule_for(layer)
    a = rule.positions(layer, x)
    moment, count = rule.second_moment(layer, x)
    assert count == a.shape[0] * a.shape[1]
    assert relative(moment, torch.einsum("nrgc,nrgd->gcd", a, a)) < 1e-12


def test_patches_are_those_of_unfold() -> None:
    layer = nn.Conv2d(3, 4, (3, 2), stride=2, padding=1, dilation=(1, 2))
    x = torch.randn(2, 3, 7, 8)
    expected = F.unfold(x, (3, 2), dilation=(1, 2), padding=1, stride=2)
    assert torch.equal(patches(layer, x).squeeze(2), expected.mT)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_only_what_is_trained_has_columns(frozen: str) -> None:
    layer = nn.Conv2d(2, 3, 2)
    getattr(layer, frozen).requires_grad_(False)
    a = rule_for(layer).positions(layer, torch.randn(4, 2, 3, 3))
    assert a.shape == (4, 4, 1, 1 if frozen == "weight" else 8)
    assert frozen == "bias" or bool((a == 1).all())
