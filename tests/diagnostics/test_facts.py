"""The facts of the paper."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gaussnewton as gn
from gaussnewton.diagnostics import block_facts, fisher_distance, gauss_newton_rank
from tests.problems import LOSSES, PIECEWISE_LINEAR, network, relative

CONVEX = ["mse", "cross-entropy", "bce", "poisson", "custom, elementwise"]


@pytest.mark.parametrize("function", PIECEWISE_LINEAR)
@pytest.mark.parametrize("loss", CONVEX)
def test_piecewise_linear_blocks_are_psd_and_gauss_newton(function: str, loss: str) -> None:
    """Lemma 1, and the remark on equal blocks in section 3.3."""
    net = network([3, 5, 4, 2], function)
    batch = torch.randn(6, 3).double(), LOSSES[loss].targets(6, 2)
    facts = block_facts(net, LOSSES[loss].make("mean"), batch)
    for fact in facts.values():
        assert fact.is_psd()
        assert fact.distance < 1e-10
        assert fact.trace >= 0  # lemma 2
    whole = gn.exact.hessian(net, LOSSES[loss].make("mean"), batch)
    assert sum(f.trace for f in facts.values()) == pytest.approx(whole.trace().item())


def test_smooth_blocks_are_neither() -> None:
    net = network([3, 5, 2], "nn.Tanh")
    batch = torch.randn(6, 3).double(), 3 * torch.randn(6, 2).double()
    fact = block_facts(net, nn.MSELoss(), batch)["layers.0"]
    assert not fact.is_psd()
    assert fact.distance > 1e-3


@pytest.mark.parametrize(
    ("loss", "outputs", "rank_each"),
    [("mse", 2, 2), ("cross-entropy", 4, 3), ("bce", 1, 1), ("cross-entropy", 2, 1)],
)
def test_rank_bound(loss: str, outputs: int, rank_each: int) -> None:
    net = network([5, 6, outputs])
    batch = torch.randn(4, 5).double(), LOSSES[loss].targets(4, outputs)
    facts = gauss_newton_rank(net, LOSSES[loss].make("mean"), batch)
    assert facts.bound == 4 * rank_each
    assert facts.rank <= facts.bound < facts.parameters
    assert facts.rank == facts.bound  # reached, with so many parameters
    assert facts.data == 4


def test_sampled_fisher_has_rank_of_data_times_samples() -> None:
    net = network([5, 8, 6])
    batch = torch.randn(3, 5).double(), torch.randn(3, 6).double()
    for samples in (1, 2):
        kfac = gn.curvature(net, nn.MSELoss(), batch, method=gn.KFAC(samples=samples))
        assert torch.linalg.matrix_rank(kfac["layers.0"].G, hermitian=True) == 3 * samples


@pytest.mark.parametrize(
    "loss",
    ["mse", "cross-entropy", "bce", "poisson", "gaussian, given variance", "bce, weights"],
)
def test_fisher_is_gauss_newton_for_exponential_families(loss: str) -> None:
    case = LOSSES[loss]
    width = case.outputs or 3
    net = network([3, 4, width])
    batch = torch.randn(5, 3).double(), case.targets(5, width)
    assert fisher_distance(net, case.make("mean"), batch) < 1e-8


def test_fisher_is_not_gauss_newton_for_the_mixture() -> None:
    net = network([3, 4, 3])
    batch = torch.randn(5, 3).double(), torch.randint(2, (5,))
    assert fisher_distance(net, gn.BinaryMixtureLoss(), batch) > 0.1


@pytest.mark.parametrize("function", ["nn.Tanh", "F.relu", "x * sigmoid(x)"])
def test_kfra_is_exact_for_one_datum_and_not_for_two(function: str) -> None:
    net, criterion = network([4, 5, 6, 3], function), nn.CrossEntropyLoss()
    x, y = torch.randn(2, 4).double(), torch.tensor([0, 2])
    for n, exact in ((1, True), (2, False)):
        kfra, kflr = (
            gn.curvature(net, criterion, (x[:n], y[:n]), method=m) for m in ("kfra", "kflr")
        )
        assert (relative(kfra["layers.0"].G, kflr["layers.0"].G) < 1e-10) is exact
