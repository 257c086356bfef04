from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.chain import Chain
from gaussnewton.jacobian import (
    gauss_newton_product,
    jacobian_product,
    layer_jacobian_products,
    transposed_product,
)


class Mixed(nn.Module):
    """Elementwise, general and identity segments, a frozen layer and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 5, bias=False)
        self.c, self.d = nn.Linear(5, 5), nn.Linear(5, 3)
        self.c.requires_grad_(False)
        self.d.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.layer_norm(self.a(x), (6,))
        return self.d(self.c(self.b(h).tanh()).relu_()).softmax(1)


def record() -> tuple[nn.Module, Tensor, gn.Tape]:
    model, criterion, x = Mixed().double(), nn.MSELoss(), torch.randn(7, 4).double()
    with gn.Tape(model, criterion) as tape:
        criterion(model(x), torch.randn(7, 3).double())
    return model, x, tape


@pytest.mark.parametrize("part", [slice(None), slice(2, 5)])
def test_against_autograd(part: slice) -> None:
    model, x, tape = record()
    theta = gn.Theta(model)
    vectors = torch.randn(2, theta.size, dtype=torch.float64)
    names = list(dict(model.named_parameters()))

    def outputs(*values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    primals = tuple(p.detach() for p in model.parameters())
    expected = []
    for v in vectors:
        moved = theta.tensors(v)
        tangents = tuple(
            moved.get(name, torch.zeros_like(p)) for name, p in model.named_parameters()
        )
        expected.append(torch.autograd.functional.jvp(outputs, primals, tangents)[1][part])
    chain = Chain(tape.record)
    matrices = [theta.matrices(v) for v in vectors]
    directions = {name: torch.stack([m[name] for m in matrices]) for name in matrices[0]}
    got = jacobian_product(chain, directions, part)
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-10, atol=1e-12)
    single = {name: V[0] for name, V in directions.items()}
    layers = layer_jacobian_products(chain, single, part)
    assert layers.shape[0] == 3
    torch.testing.assert_close(layers.sum(0), expected[0], rtol=1e-10, atol=1e-12)


def test_transpose_and_gauss_newton_product() -> None:
    model, x, tape = record()
    theta, chain = gn.Theta(model), Chain(tape.record)
    v = torch.randn(theta.size, dtype=torch.float64)
    r = torch.randn(7, 3, dtype=torch.float64)
    matrices = theta.matrices(v)
    forward = jacobian_product(chain, {k: V.unsqueeze(0) for k, V in matrices.items()})[0]
    back = transposed_product(chain, r)
    torch.testing.assert_close((forward * r).sum(), theta.join(back) @ v)
    criterion = nn.MSELoss()
    expected = gn.exact.gauss_newton_product(model, criterion, (x, tape.record.targets))(v)
    got = theta.join(gauss_newton_product(chain, matrices))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
