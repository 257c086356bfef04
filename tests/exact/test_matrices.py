from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from gaussnewton import exact
from gaussnewton.errors import BatchError, NoTrainableParametersError
from gaussnewton.parameters import Theta

from .cases import (
    CLASSES,
    F64,
    NATURAL,
    REAL,
    N,
    call,
    filled,
    flat,
    mlp,
    outputs_by_theta,
    random,
    reference_gauss_newton,
    reference_hessian,
    reference_jacobian,
)

X = random(N, 3, seed=1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NATURAL)
def test_hessian_and_gauss_newton_are_those_of_functorch(name, bias):
    criterion, y = NATURAL[name]
    model = mlp(bias=bias)
    H, G = exact.hessian(model, criterion, (X, y)), exact.gauss_newton(model, criterion, (X, y))
    assert_close(H, reference_hessian(model, criterion, (X, y)))
    assert_close(G, reference_gauss_newton(model, criterion, (X, y)))
    assert not torch.allclose(H, G, rtol=1e-2)  # tanh bends, so that the two differ


def test_hessian_by_finite_differences_of_the_loss():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    f, v = outputs_by_theta(model, X), flat(mlp())

    def E(w):
        return call(criterion, f(w), CLASSES).item()

    H, step = exact.hessian(model, criterion, (X, CLASSES)), 1e-4
    units = step * torch.eye(len(v), dtype=F64)
    for i, j in [(0, 0), (0, 1), (3, 14), (16, 21), (21, 21), (12, 2)]:
        a, b = units[i], units[j]
        difference = E(v + a + b) - E(v + a - b) - E(v - a + b) + E(v - a - b)
        assert H[i, j].item() == pytest.approx(difference / (4 * step**2), abs=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_block_of_a_linear_layer_is_a_sum_of_kronecker_products(bias):
    """Eq. gn:blocks, which also fixes the order of θ: Σ_n (a aᵀ) ⊗ H_n."""
    model, criterion = mlp((3, 2), bias=bias), nn.CrossEntropyLoss(reduction="sum")
    a = torch.cat([X, torch.ones(N, 1, dtype=F64)], dim=1) if bias else X
    p = model(X).detach().softmax(1)
    expected = sum(
        torch.kron(torch.outer(a[n], a[n]), p[n].diag() - torch.outer(p[n], p[n])) for n in range(N)
    )
    assert_close(exact.gauss_newton(model, criterion, (X, CLASSES)), expected)
    assert_close(exact.hessian(model, criterion, (X, CLASSES)), expected)


def test_piecewise_linear_blocks_of_hessian_and_gauss_newton_agree():
    """Section 3.3: with f'' = 0 the diagonal blocks are equal, the others are not."""
    model, batch = mlp((3, 4, 4, 2), activation=nn.LeakyReLU), (X, REAL)
    H = exact.split(exact.hessian(model, nn.MSELoss(), batch), model)
    G = exact.split(exact.gauss_newton(model, nn.MSELoss(), batch), model)
    for name in ("0", "2", "4"):
        assert_close(H[name, name], G[name, name])
    assert not torch.allclose(H["0", "4"], G["0", "4"], rtol=1e-2)


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton", "fisher"])
@pytest.mark.parametrize("bias", [True, False])
def test_blocks_lie_on_the_diagonal_of_the_full_matrix(kind, bias):
    model, batch = mlp((3, 4, 2), bias=bias), (X, CLASSES)
    full = exact.split(getattr(exact, kind)(model, nn.CrossEntropyLoss(), batch), model)
    blocks = getattr(exact, f"{kind}_blocks")(model, nn.CrossEntropyLoss(), batch)
    assert list(blocks) == ["0", "2"]
    for name, block in blocks.items():
        assert block.shape == (Theta(model)[name].size,) * 2
        assert_close(block, full[name, name])


def test_split_has_all_pairs_and_puts_them_where_they_belong():
    model = mlp((3, 4, 2))
    matrix = random(26, 26)
    parts = exact.split(matrix, model)
    assert_close(parts["0", "2"], matrix[:16, 16:])
    assert_close(parts["2", "0"], matrix[16:, :16])
    with pytest.raises(ValueError, match="does not fit θ"):
        exact.split(matrix[:3, :3], model)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(1, 2, 2)
        self.normalisation = nn.BatchNorm1d(2)
        self.scale = nn.Parameter(torch.ones(2))
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        h = self.normalisation(self.convolution(x.unsqueeze(1))).tanh()
        return self.scale * self.out(h.flatten(1))


@pytest.mark.parametrize("training", [True, False])
def test_any_module_also_one_that_couples_the_data(training):
    model = filled(Convolutional().to(F64)).train(training)
    model.normalisation.running_var.fill_(2.0)
    jacobian_model = filled(Convolutional().to(F64)).train(training)
    jacobian_model.normalisation.running_var.fill_(2.0)
    jacobian_model.normalisation.momentum = 0.0  # the reference must not see moving statistics
    jacobian_model.normalisation.num_batches_tracked = None
    batch = (X, REAL)
    G = exact.gauss_newton(model, nn.MSELoss(), batch)
    J = torch.cat(
        [
            torch.stack([_numeric(jacobian_model, p, i) for i in range(p.numel())], dim=-1)
            .reshape(N, 2, *p.shape)
            .flatten(2)
            for p in jacobian_model.parameters()
        ],
        dim=2,
    )
    # the eigenvalues do not depend on how θ is ordered
    expected = torch.einsum("ndp,meq,nm,de->pq", J, J, torch.eye(N).to(J), torch.eye(2).to(J))
    expected = expected * 2 / (2 * N)
    values = torch.linalg.eigvalsh(G)
    assert_close(values, torch.linalg.eigvalsh(expected), atol=1e-6, rtol=1e-6)
    assert values[-1] > 0.1


def _numeric(model, p, i, step=1e-5):
    """Central differences of the outputs by one entry of a parameter."""
    flat_p = p.data.view(-1)
    with torch.no_grad():
        flat_p[i] += step
        up = model(X)
        flat_p[i] -= 2 * step
        down = model(X)
        flat_p[i] += step
    return (up - down) / (2 * step)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(1, 2, batch_first=True)
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)
        self.out = nn.Linear(2, 2)

    def forward(self, x):
        h, _ = self.recurrent(x.unsqueeze(2))
        h, _ = self.attention(h, h, h, need_weights=False)
        return self.out(h.mean(1))


def test_recurrent_and_attention_layers_have_all_three():
    model, criterion = filled(Sequence().to(F64)), nn.CrossEntropyLoss()
    batch = (X, CLASSES)
    H, G = exact.hessian(model, criterion, batch), exact.gauss_newton(model, criterion, batch)
    F = exact.fisher(model, criterion, batch)
    product = exact.gauss_newton_product(model, criterion, batch)
    v = random(len(G), seed=2)
    assert_close(H, H.T)
    assert_close(F, G)
    assert_close(product(v), G @ v)
    assert G.diagonal().min() >= 0
    assert torch.linalg.eigvalsh(H)[0] < -1e-4


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = mlp((3, 2))

    def forward(self, left, right):
        return self.layer(left - right)


def test_inputs_as_tuple_and_as_dict():
    model, right = TwoInputs(), random(N, 3, seed=6)
    expected = exact.gauss_newton(model.layer, nn.MSELoss(), (X - right, REAL))
    by_position = exact.gauss_newton(model, nn.MSELoss(), ((X, right), REAL))
    by_keyword = exact.gauss_newton(model, nn.MSELoss(), ({"right": right, "left": X}, REAL))
    assert_close(by_position, expected)
    assert_close(by_keyword, expected)


def test_frozen_parameters_are_not_in_theta():
    model, whole = mlp((3, 4, 2)), mlp((3, 4, 2))
    model[0].weight.requires_grad_(False)
    H = exact.hessian(model, nn.MSELoss(), (X, REAL))
    expected = exact.hessian(whole, nn.MSELoss(), (X, REAL))
    assert H.shape == (14, 14)
    assert_close(H, expected[12:, 12:])  # the bias is the last column of the first layer


def test_unused_parameters_have_no_curvature():
    model = mlp((3, 2))
    model.spare = nn.Parameter(torch.ones(2, dtype=F64))
    model.forward = model[0].forward
    for kind in ("hessian", "gauss_newton", "fisher"):
        matrix = getattr(exact, kind)(model, nn.MSELoss(), (X, REAL))
        parts = exact.split(matrix, model)
        assert not parts["spare", "spare"].any()
        assert not parts["0", "spare"].any()
        assert parts["0", "0"].diagonal().min() > 0


def test_tied_weights_count_once():
    model = mlp((3, 3, 3), activation=nn.Tanh)
    model[2].weight = model[0].weight
    y = random(N, 3, seed=7)
    H = exact.hessian(model, nn.MSELoss(), (X, y))
    assert H.shape == (15, 15)
    assert_close(H, reference_hessian(model, nn.MSELoss(), (X, y)))


def test_outputs_of_one_dimension():
    model = nn.Sequential(mlp((3, 4, 1)), nn.Flatten(0))
    y = random(N, seed=5)
    expected = 2 / N * torch.einsum("ndp,ndq->pq", *[reference_jacobian(model, X)] * 2)
    assert_close(exact.gauss_newton(model, nn.MSELoss(), (X, y)), expected)
    assert_close(exact.fisher(model, nn.MSELoss(), (X, y)), expected)


def test_linear_loss_has_no_gauss_newton_but_a_hessian():
    model = mlp()
    assert not exact.gauss_newton(model, lambda o, y: (o * y).sum(), (X, REAL)).any()
    assert exact.hessian(model, lambda o, y: (o * y).sum(), (X, REAL)).abs().max() > 0.1
    assert not exact.hessian(mlp((3, 2)), lambda o, y: (o * y).sum(), (X, REAL)).any()


def test_named_errors():
    model = mlp()
    with pytest.raises(BatchError, match="pair"):
        exact.hessian(model, nn.MSELoss(), (X, REAL, REAL))
    with pytest.raises(BatchError, match="no data"):
        exact.gauss_newton(model, nn.MSELoss(), (X[:0], REAL[:0]))
    with pytest.raises(BatchError, match="one tensor"):
        exact.hessian(nn.GRU(3, 2).to(F64), nn.MSELoss(), (X, REAL))
    with pytest.raises(NoTrainableParametersError):
        exact.hessian(model.requires_grad_(False), nn.MSELoss(), (X, REAL))
