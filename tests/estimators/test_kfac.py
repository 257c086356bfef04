from __future__ import annotations

import pytest
import torch
from torch import nn

import gaussnewton as gn
from tests.problems import LOSSES, network, relative

# Losses whose Fisher matrix is the Gauss-Newton matrix.
SAME = [
    "mse",
    "cross-entropy",
    "cross-entropy, weights, ignored, smoothed",
    "cross-entropy, probabilities",
    "bce",
    "bce, weights",
    "poisson",
    "gaussian, given variance",
]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", SAME)
def test_converges_to_kflr_as_samples_grow(loss: str, reduction: str) -> None:
    case = LOSSES[loss]
    width = case.outputs or 3
    net = network([4, 5, width])
    batch = torch.randn(6, 4).double(), case.targets(6, width)
    criterion = case.make(reduction)
    kflr = gn.curvature(net, criterion, batch, method="kflr")

    def error(samples: int) -> float:
        kfac = gn.curvature(net, criterion, batch, method=gn.KFAC(samples, seed=3))
        return max(relative(kfac[name].G, kflr[name].G) for name in kflr)

    few, many = error(30), error(30_000)
    assert many < 0.05
    assert many < few / 5  # 1/√S would be 1/31


def test_converges_to_the_fisher_and_not_to_gauss_newton_on_the_mixture() -> None:
    net = network([4, 3], "nn.Tanh")
    criterion = gn.BinaryMixtureLoss()
    x, y = torch.randn(5, 4).double(), torch.randint(2, (5,))
    G = gn.curvature(net, criterion, (x, y), method=gn.KFAC(samples=4000))["layers.0"].G
    F = gn.exact.output_fisher(criterion, net(x).detach(), y).sum(0)
    H = gn.exact.output_hessian(criterion, net(x).detach(), y).sum(0)
    assert relative(G, F) < 0.1
    assert relative(G, H) > 0.2


def test_predicted_variance_converges_to_the_fisher() -> None:
    class MeanAndVariance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            mean, raw = self.layer(x).chunk(2, dim=1)
            return mean, nn.functional.softplus(raw) + 0.1

    net, criterion = MeanAndVariance().double(), nn.GaussianNLLLoss()
    batch = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    kfac = gn.curvature(net, criterion, batch, method=gn.KFAC(samples=30_000))
    blocks = gn.exact.fisher_blocks(net, criterion, batch)
    # One layer: its Fisher block at inputs 1 is G, so look at the bias rows and columns.
    size = 4
    assert relative(kfac["layer"].G, blocks["layer"][-size:, -size:]) < 0.03


def test_own_generator_is_reproducible_and_touches_nothing() -> None:
    net = network([4, 5, 3])
    batch = torch.randn(6, 4).double(), torch.randint(3, (6,))
    criterion = nn.CrossEntropyLoss()
    before = torch.get_rng_state()
    first = gn.curvature(net, criterion, batch, method=gn.KFAC(seed=5))["layers.0"].G
    again = gn.curvature(net, criterion, batch, method=gn.KFAC(seed=5))["layers.0"].G
    other = gn.curvature(net, criterion, batch, method=gn.KFAC(seed=6))["layers.0"].G
    estimator = gn.KFAC(seed=5)
    gn.curvature(net, criterion, batch, method=estimator)
    second = gn.curvature(net, criterion, batch, method=estimator)["layers.0"].G
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, second)  # one estimator goes on drawing
    assert torch.equal(before, torch.get_rng_state())


def test_a_loss_without_a_model_distribution_has_draws_of_its_hessian() -> None:
    def saturating(h: Tensor, y: Tensor) -> Tensor:
        return ((h - y).square().sum(1) + 1).log().mean()

    torch.manual_seed(0)
    batch = torch.randn(4, 3).double(), 0.3 * torch.randn(4, 2).double()
    model = nn.Linear(3, 2).double()
    for fn in (saturating, lambda h, y: (h - y).pow(4).mean()):
        kflr = gn.curvature(model, gn.Loss(fn), batch)
        kfac = gn.curvature(model, gn.Loss(fn), batch, method=gn.KFAC(samples=20_000))
        assert relative(kfac[""].G, kflr[""].G) < 0.03


def test_needs_a_sample() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        gn.KFAC(samples=0)
