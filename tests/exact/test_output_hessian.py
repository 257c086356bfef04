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
    F64,
    NATURAL,
    REAL,
    Mixture,
    N,
    mlp,
    random,
    reference_output_hessian,
)

OUTPUTS = random(N, 2, seed=2)


@pytest.mark.parametrize("name", NATURAL)
def test_is_the_second_derivative_of_each_datum(name):
    criterion, y = NATURAL[name]
    H = exact.output_hessian(criterion, OUTPUTS, y)
    assert_close(H, reference_output_hessian(criterion, OUTPUTS, y))


def test_cross_entropy_and_bernoulli_in_closed_form():
    p = OUTPUTS.softmax(1)
    expected = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / N
    assert_close(exact.output_hessian(nn.CrossEntropyLoss(), OUTPUTS, CLASSES), expected)
    q = OUTPUTS.sigmoid()
    expected = torch.diag_embed(q * (1 - q)) / (2 * N)
    assert_close(exact.output_hessian(nn.BCEWithLogitsLoss(), OUTPUTS, BITS), expected)


def test_more_dimensions_are_flattened():
    outputs, y = random(N, 3, 2, seed=5), torch.arange(2 * N).reshape(N, 2) % 3
    H = exact.output_hessian(nn.CrossEntropyLoss(reduction="none"), outputs, y)
    p = outputs.softmax(1)
    assert H.shape == (N, 6, 6)
    # outputs are numbered class first, position second
    assert_close(H[:, 0, 2], -p[:, 0, 0] * p[:, 1, 0])
    assert_close(H[:, 1, 5], -p[:, 0, 1] * p[:, 2, 1])
    assert not H[:, 0, 1].any()


def test_nll_has_the_geometry_of_cross_entropy():
    log_p = OUTPUTS.log_softmax(1)
    y, weight = CLASSES, torch.tensor([0.5, 2.0], dtype=F64)
    nll = exact.output_hessian(nn.NLLLoss(weight=weight), log_p, y)
    assert_close(nll, exact.output_hessian(nn.CrossEntropyLoss(weight=weight), OUTPUTS, y))
    assert nll.abs().max() > 0.01


def test_nll_gauss_newton_is_that_of_cross_entropy_on_the_logits():
    x = random(N, 3, seed=1)
    G = exact.gauss_newton(mlp(last=nn.LogSoftmax(1)), nn.NLLLoss(), (x, CLASSES))
    assert_close(G, exact.gauss_newton(mlp(), nn.CrossEntropyLoss(), (x, CLASSES)))


def test_indefinite_matrices_become_their_psd_part_and_others_stay():
    criterion, outputs = Mixture(), 2 * random(N, 3, seed=11)
    y = torch.tensor([0.0, 1, 1, 0, 1], dtype=F64)
    raw = reference_output_hessian(criterion, outputs, y)
    values, vectors = torch.linalg.eigh(raw)
    assert (values[:, 0] < -1e-4).any()
    expected = vectors @ torch.diag_embed(values.clamp(min=0)) @ vectors.mT
    assert_close(exact.output_hessian(criterion, outputs, y), expected)


def test_only_the_datum_that_is_not_psd_is_changed():
    def quartic(o, y):
        return (y * o.square()).sum()

    y = torch.tensor([[1.0, 2.0], [1.0, -3.0], [-1.0, -1.0], [0.0, 0.0], [4.0, 4.0]], dtype=F64)
    H = exact.output_hessian(quartic, OUTPUTS, y)
    assert torch.equal(H, torch.diag_embed(2 * y.clamp(min=0)))


def test_predicted_variance_is_stacked_with_the_mean():
    mean, variance = REAL, random(N, 2, seed=6).abs() + 0.2
    y, criterion = random(N, 2, seed=7), nn.GaussianNLLLoss()
    H = exact.output_hessian(criterion, (mean, variance), y)
    assert_close(exact.output_hessian(criterion, torch.stack([mean, variance], 1), y), H)
    # the 2 × 2 Hessian of one element, in closed form, and its PSD part
    e = mean - y
    raw = torch.stack(
        [
            torch.stack([1 / variance, -e / variance**2], -1),
            torch.stack([-e / variance**2, e**2 / variance**3 - 0.5 / variance**2], -1),
        ],
        -2,
    ) / (2 * N)
    values, vectors = torch.linalg.eigh(raw)
    assert (values < 0).any()
    clipped = vectors @ torch.diag_embed(values.clamp(min=0)) @ vectors.mT
    for d in range(2):
        assert_close(H[:, d::2, d::2], clipped[:, d])
    assert H[:, 0::2, 1::2].abs().max() < 1e-12


def test_one_variance_a_row_is_spread_over_the_outputs():
    variance, y = random(N, seed=6).abs() + 0.2, random(N, 2, seed=7)
    H = exact.output_hessian(nn.GaussianNLLLoss(), (REAL, variance), y)
    spread = variance.unsqueeze(1).expand_as(REAL).clone()
    assert_close(H, exact.output_hessian(nn.GaussianNLLLoss(), (REAL, spread), y))


def test_a_criterion_that_couples_the_data_is_refused():
    with pytest.raises(UnsupportedLossError, match="couples the data"):
        exact.output_hessian(lambda o, y: (o - y).sum().square(), OUTPUTS, REAL)


def test_a_criterion_that_autograd_cannot_follow_is_refused():
    with pytest.raises(UnsupportedLossError, match="autograd"):
        exact.output_hessian(lambda o, y: (o.detach() - y).sum(), OUTPUTS, REAL)


def test_nan_is_named():
    outputs = OUTPUTS.clone()
    outputs[1, 1] = torch.nan
    with pytest.raises(NonFiniteError):
        exact.output_hessian(nn.CrossEntropyLoss(), outputs, CLASSES)


def test_works_where_gradients_are_off():
    expected = exact.output_hessian(nn.CrossEntropyLoss(), OUTPUTS, CLASSES)
    with torch.no_grad():
        assert_close(exact.output_hessian(nn.CrossEntropyLoss(), OUTPUTS, CLASSES), expected)
