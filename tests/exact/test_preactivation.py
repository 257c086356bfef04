from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from gaussnewton import exact

from .cases import CLASSES, F64, REAL, Mixture, N, filled, mlp, random

X = random(N, 3, seed=1)


class InplaceReLU(nn.ReLU):
    def __init__(self):
        super().__init__(inplace=True)


def inputs_of(model, layer, bias):
    """What a layer was given, with the 1 of the bias."""
    seen = []
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    model(X)
    handle.remove()
    return torch.cat([seen[0], torch.ones(N, 1, dtype=F64)], dim=1) if bias else seen[0]


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU, InplaceReLU])
@pytest.mark.parametrize("bias", [True, False])
def test_hessians_make_the_blocks_of_the_parameter_hessian(activation, bias):
    """Eq. hess:kron: the block is the sum over data of (a aᵀ) ⊗ H."""
    model, criterion = mlp((3, 4, 3, 2), activation=activation, bias=bias), nn.CrossEntropyLoss()
    H = exact.preactivation_hessian(model, criterion, (X, CLASSES))
    blocks = exact.hessian_blocks(model, criterion, (X, CLASSES))
    assert list(H) == ["0", "2", "4"]
    for name in H:
        a = inputs_of(model, model.get_submodule(name), bias)
        expected = sum(torch.kron(torch.outer(a[n], a[n]), H[name][n]) for n in range(N))
        assert_close(blocks[name], expected)
        assert blocks[name].abs().max() > 1e-3


@pytest.mark.parametrize("activation", [nn.Tanh, InplaceReLU])
@pytest.mark.parametrize("name", ["mse", "ce", "mixture"])
def test_gauss_newton_is_the_block_of_the_bias(activation, name):
    """A bias sees a = 1, so that its block in eq. gn:blocks is Σ 𝒢 itself."""
    criterion, y = {
        "mse": (nn.MSELoss(), random(N, 3, seed=4)),
        "ce": (nn.CrossEntropyLoss(reduction="sum"), CLASSES),
        "mixture": (Mixture(), CLASSES.to(F64)),
    }[name]
    model = mlp((3, 4, 3), activation=activation)
    G = exact.preactivation_gauss_newton(model, criterion, (X, y))
    blocks = exact.gauss_newton_blocks(model, criterion, (X, y))
    assert list(G) == ["0", "2"]
    for layer, matrix in G.items():
        out = len(matrix)
        assert_close(matrix, blocks[layer][-out:, -out:])
        assert matrix.abs().max() > 1e-3


def test_equal_for_piecewise_linear_networks_and_not_for_others():
    batch = (X, CLASSES)
    for activation, equal in ((InplaceReLU, True), (nn.Tanh, False)):
        model = mlp((3, 4, 2), activation=activation)
        G = exact.preactivation_gauss_newton(model, nn.CrossEntropyLoss(), batch)["0"]
        H = exact.preactivation_hessian(model, nn.CrossEntropyLoss(), batch)["0"].sum(0)
        assert torch.allclose(G, H, rtol=1e-6) == equal


class Odd(nn.Module):
    """Layers that are shared, frozen, unused, or run over a sequence; and one plain one."""

    def __init__(self):
        super().__init__()
        self.shared, self.frozen, self.unused = (nn.Linear(3, 3) for _ in range(3))
        self.sequence, self.plain = nn.Linear(1, 2), nn.Linear(6, 2, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.shared(self.shared(self.frozen(x)).tanh())
        return self.plain(self.sequence(x.unsqueeze(2)).flatten(1))


def test_only_layers_called_once_on_vectors():
    model = filled(Odd().to(F64))
    assert list(exact.preactivation_hessian(model, nn.MSELoss(), (X, REAL))) == ["plain"]
    G = exact.preactivation_gauss_newton(model, nn.MSELoss(reduction="sum"), (X, REAL))
    assert_close(G, {"plain": 2 * N * torch.eye(2, dtype=F64)})
