from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from gaussnewton import exact
from gaussnewton.exact.output_hessian import is_convex

from .cases import CLASSES, F64, NATURAL, REAL, WEIGHTS, Mixture, N, mlp, random

X = random(N, 3, seed=1)
KINDS = ["hessian", "gauss_newton", "fisher"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NATURAL)
@pytest.mark.parametrize("kind", KINDS)
def test_product_is_that_of_the_dense_matrix(kind, name, bias):
    criterion, y = NATURAL[name]
    model = mlp(bias=bias)
    matrix = getattr(exact, kind)(model, criterion, (X, y))
    product = getattr(exact, f"{kind}_product")(model, criterion, (X, y), damping=0.25)
    for seed in range(3):  # one recorded graph serves many products
        v = random(len(matrix), seed=seed)
        assert_close(product(v), matrix @ v + 0.25 * v)


@pytest.mark.parametrize("kind", KINDS)
def test_mixture_whose_hessian_needs_its_psd_part(kind):
    model, batch = mlp((3, 4, 3)), (2 * X, torch.tensor([0.0, 1, 1, 0, 1], dtype=F64))
    matrix = getattr(exact, kind)(model, Mixture(), batch)
    product = getattr(exact, f"{kind}_product")(model, Mixture(), batch)
    v = random(len(matrix))
    assert_close(product(v), matrix @ v)
    assert (torch.linalg.eigvalsh(matrix)[0] < -1e-3) == (kind == "hessian")


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp((3, 4, 4))

    def forward(self, x):
        h = self.layers(x)
        return h[:, :2], h[:, 2:].exp()


@pytest.mark.parametrize("kind", KINDS)
def test_predicted_variance(kind):
    model = Pair()
    matrix = getattr(exact, kind)(model, nn.GaussianNLLLoss(), (X, REAL))
    product = getattr(exact, f"{kind}_product")(model, nn.GaussianNLLLoss(), (X, REAL))
    v = random(len(matrix))
    assert_close(product(v), matrix @ v)


def test_is_convex_is_careful():
    assert is_convex(nn.CrossEntropyLoss(weight=WEIGHTS), CLASSES)
    assert not is_convex(nn.CrossEntropyLoss(weight=-WEIGHTS), CLASSES)
    assert not is_convex(nn.PoissonNLLLoss(log_input=False), REAL)
    assert is_convex(nn.GaussianNLLLoss(), (REAL, REAL))
    assert not is_convex(nn.GaussianNLLLoss(), REAL)
    assert not is_convex(Mixture(), REAL)

    class Concave(nn.MSELoss):
        def forward(self, outputs, targets):
            return -super().forward(outputs, targets)

    assert not is_convex(Concave(), REAL)
    product = exact.gauss_newton_product(mlp(), Concave(), (X, REAL))
    assert not product(random(26)).any()


def test_a_large_output_needs_no_matrix_of_it():
    """With 2000 outputs and 300 data, one matrix a datum would be 9.6 GB."""
    wide = mlp((3, 2, 2000))
    x, y = random(300, 3, seed=5), (random(300, 2000, seed=6) > 0).to(F64)
    for criterion in (nn.BCEWithLogitsLoss(), nn.MSELoss()):
        v = random(8 + 6000)
        G = exact.gauss_newton_product(wide, criterion, (x, y))(v)
        assert_close(exact.fisher_product(wide, criterion, (x, y))(v), G)
        assert v @ G > 0


def test_vector_and_damping_are_checked():
    with pytest.raises(ValueError, match="does not fit θ"):
        exact.hessian_product(mlp(), nn.MSELoss(), (X, REAL))(random(3))
    with pytest.raises(ValueError, match="negative"):
        exact.fisher_product(mlp(), nn.MSELoss(), (X, REAL), damping=-1.0)


def test_product_leaves_no_graph_on_its_result():
    v = random(26).requires_grad_()
    assert not exact.gauss_newton_product(mlp(), nn.MSELoss(), (X, REAL))(v).requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_graph_outlives_the_restored_buffers(kind):
    """Running statistics are put back after recording, and the graph must still be valid."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).to(F64)
    twin = copy.deepcopy(model)
    product = getattr(exact, f"{kind}_product")(model, nn.MSELoss(), (X, REAL))
    matrix = getattr(exact, kind)(twin, nn.MSELoss(), (X, REAL))
    v = random(len(matrix))
    assert_close(product(v), matrix @ v)
    assert_close(product(2 * v), 2 * matrix @ v)


def test_checkpointed_model_runs_again_and_is_left_alone():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.BatchNorm1d(3), mlp()).to(F64)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)

    model = Checkpointed()
    before = copy.deepcopy(model.state_dict())
    product = exact.gauss_newton_product(model, nn.MSELoss(), (X, REAL))
    v = random(6 + 26)
    assert_close(product(v), exact.gauss_newton(model.layers, nn.MSELoss(), (X, REAL)) @ v)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
