from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from gaussnewton import exact
from gaussnewton.errors import NonFiniteError, UnsupportedLossError

from .cases import (
    BITS,
    CLASSES,
    COUNTS,
    F64,
    NATURAL,
    REAL,
    Mixture,
    N,
    mlp,
    random,
    reference_jacobian,
)

X = random(N, 3, seed=1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NATURAL)
def test_equals_gauss_newton_for_natural_parameters(name, bias):
    """Eq. fisher:equiv. The two share no arithmetic: enumeration here, autograd there."""
    criterion, y = NATURAL[name]
    model = mlp(bias=bias)
    G = exact.gauss_newton(model, criterion, (X, y))
    assert_close(exact.fisher(model, criterion, (X, y)), G)
    assert G.abs().max() > 1e-3


def test_nll_is_cross_entropy():
    y, weight = CLASSES, torch.tensor([0.5, 2.0], dtype=F64)
    F = exact.fisher(mlp(last=nn.LogSoftmax(1)), nn.NLLLoss(weight=weight), (X, y))
    assert_close(F, exact.gauss_newton(mlp(), nn.CrossEntropyLoss(weight=weight), (X, y)))


def test_each_position_is_a_categorical_variable():
    model = nn.Sequential(mlp((3, 4, 6)), nn.Unflatten(1, (3, 2)))
    y = (torch.arange(2 * N) % 3).reshape(N, 2)
    y[0, 0] = -100
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=F64))
    F = exact.fisher(model, criterion, (X, y))
    assert_close(F, exact.gauss_newton(model, criterion, (X, y)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [True, False])
def test_mixture_differs_from_gauss_newton(reduction, bias):
    """Section 5.2: the model is of no exponential family."""
    model, criterion = mlp((3, 4, 3), bias=bias), Mixture(reduction)
    y = torch.tensor([0.0, 1, 1, 0, 1], dtype=F64)
    F, G = (f(model, criterion, (X, y)) for f in (exact.fisher, exact.gauss_newton))
    assert (F - G).norm() > 0.1 * G.norm()
    # y is 0 or 1 with p = P(1), so that the Fisher is Σ ∇p ∇pᵀ / (p (1 - p))
    outputs = model(X).detach().requires_grad_()
    p = criterion.probability(outputs, torch.ones(N, dtype=F64))
    (slope,) = torch.autograd.grad(p.sum(), outputs)
    rows = torch.einsum("ndp,nd->np", reference_jacobian(model, X), slope)
    expected = (rows.T / (p * (1 - p)).detach()) @ rows / (N if reduction == "mean" else 1)
    assert_close(F, expected)


def test_probabilities_as_outputs():
    """1 / (p (1 - p)) whatever the targets; the second derivative depends on them."""
    p = random(N, 2, seed=4).sigmoid()
    F = exact.output_fisher(nn.BCELoss(), p, BITS)
    assert_close(F, torch.diag_embed(1 / (p * (1 - p))) / (2 * N))
    assert not torch.allclose(F, exact.output_hessian(nn.BCELoss(), p, BITS), rtol=0.1)


def test_predicted_variance():
    """diag(1 / v, 1 / (2 v²)) for each element."""
    mean, v = REAL, random(N, 2, seed=6).abs() + 0.2
    F = exact.output_fisher(nn.GaussianNLLLoss(reduction="sum"), (mean, v), REAL + 1)
    assert_close(F, torch.diag_embed(torch.cat([1 / v, 0.5 / v**2], dim=1)))


class MeanAndVariance(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp((3, 4, 3))

    def forward(self, x):
        h = self.layers(x)
        return h[:, :2], h[:, 2:].exp()  # one variance for both means


def test_predicted_variance_through_a_model():
    model, criterion = MeanAndVariance(), nn.GaussianNLLLoss()
    F = exact.fisher(model, criterion, (X, REAL))
    J = reference_jacobian(model.layers, X)
    v = model(X)[1].detach().squeeze(1)
    by_layer = torch.stack([1 / v, 1 / v, torch.ones_like(v)], dim=1)  # of the log-variance: 2 · ½
    expected = torch.einsum("ndp,nd,ndq->pq", J, by_layer, J) / (2 * N)
    assert_close(F, expected)


@pytest.mark.parametrize("log_input", [True, False])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_poisson_for_small_and_large_rates(log_input, scale):
    rate = scale * (random(N, 2, seed=4).abs() + 0.01)
    outputs = rate.log() if log_input else rate
    criterion = nn.PoissonNLLLoss(log_input=log_input, reduction="sum", eps=1e-12)
    F = exact.output_fisher(criterion, outputs, COUNTS)
    assert_close(F, torch.diag_embed(rate if log_input else 1 / rate))


def test_targets_enter_only_by_their_weight():
    model = mlp((3, 4, 3))
    other = torch.tensor([1.0, 1, 0, 0, 0], dtype=F64)
    batches = [(X, y) for y in (torch.zeros(N, dtype=F64), other)]
    F = [exact.fisher(model, Mixture(), batch) for batch in batches]
    G = [exact.gauss_newton(model, Mixture(), batch) for batch in batches]
    assert torch.equal(*F)
    assert not torch.allclose(*G, rtol=0.1)


def test_ignored_targets_count_nothing():
    y = CLASSES.clone()
    y[2:] = -100
    F = exact.output_fisher(nn.CrossEntropyLoss(), REAL, y)
    assert_close(F[:2], exact.output_fisher(nn.CrossEntropyLoss(), REAL[:2], y[:2]))
    assert not F[2:].any()
    with pytest.raises(NonFiniteError, match="all ignored"):
        exact.output_fisher(nn.CrossEntropyLoss(), REAL, torch.full_like(y, -100))


class Half(nn.MSELoss):
    def forward(self, outputs, targets):
        return 0.5 * super().forward(outputs, targets)


@pytest.mark.parametrize("criterion", [nn.L1Loss(), nn.functional.mse_loss, Half()])
def test_other_criteria_are_refused_with_a_reason(criterion):
    with pytest.raises(UnsupportedLossError, match=r"support\(outputs\)"):
        exact.fisher(mlp(), criterion, (X, REAL))


def test_support_needs_a_known_reduction():
    with pytest.raises(UnsupportedLossError, match="reduction"):
        exact.fisher(mlp((3, 4, 3)), Mixture("median"), (X, torch.zeros(N, dtype=F64)))


def test_own_criterion_keeps_its_reduction():
    criterion = Mixture("mean")
    exact.fisher(mlp((3, 4, 3)), criterion, (X, torch.zeros(N, dtype=F64)))
    assert criterion.reduction == "mean"
