"""Each loss's Hessian against autograd, on outputs of several shapes."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.losses import geometry_of
from gaussnewton.perdatum import Diagonal
from tests.problems import LOSSES, relative

F64 = torch.float64


@pytest.mark.parametrize(
    ("name", "reduction"), [(name, r) for name, case in LOSSES.items() for r in case.reductions]
)
def test_hessian_is_that_of_the_scalar(name: str, reduction: str) -> None:
    case = LOSSES[name]
    width = case.outputs or 4
    criterion, outputs = case.make(reduction), torch.randn(5, width, dtype=F64)
    targets = case.targets(5, width)
    geometry = geometry_of(criterion)
    arguments = targets if isinstance(targets, tuple) else (targets,)
    bound = geometry.bind(outputs, *arguments)
    geometry.check(*bound)
    H = geometry.hessian(*bound)
    exact = gn.exact.output_hessian(criterion, outputs, targets)
    torch.testing.assert_close(H.dense(), exact, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(geometry.value(*bound), criterion(outputs, *arguments).sum())


def test_targets_that_poisson_without_log_depends_on() -> None:
    criterion = nn.PoissonNLLLoss(log_input=False, full=True)
    outputs, targets = 0.5 + torch.rand(4, 3, dtype=F64), torch.arange(12.0).reshape(4, 3).double()
    H = geometry_of(criterion).hessian(outputs, targets).dense()
    torch.testing.assert_close(H, gn.exact.output_hessian(criterion, outputs, targets))


def test_gaussian_variance_for_each_row_and_below_eps() -> None:
    criterion, mean = nn.GaussianNLLLoss(eps=0.3), torch.randn(4, 3, dtype=F64)
    target = torch.randn(4, 3, dtype=F64)
    for var in (torch.rand(4, dtype=F64), torch.rand(4, 1, dtype=F64), torch.tensor(0.7)):
        geometry = geometry_of(criterion)
        H = geometry.hessian(*geometry.bind(mean, target, var.to(F64))).dense()
        expected = gn.exact.output_hessian(
            criterion, mean, (target, var.to(F64).expand(4, 3) if not var.ndim else var)
        )
        torch.testing.assert_close(H, expected)


def test_custom_elementwise_loss_is_found_to_be_diagonal() -> None:
    criterion = gn.Loss(lambda h, y: nn.functional.huber_loss(h, y))
    outputs, targets = torch.randn(3, 50), torch.randn(3, 50)
    assert isinstance(geometry_of(criterion).hessian(outputs, targets), Diagonal)


def test_custom_loss_is_replaced_by_its_psd_part() -> None:
    criterion = gn.Loss(lambda h, y: (h[:, 0] * h[:, 1] * y).sum(), reduction="sum")
    H = geometry_of(criterion).hessian(torch.zeros(2, 2, dtype=F64), torch.ones(2).double())
    expected = torch.full((2, 2, 2), 0.5, dtype=F64)  # of [[0, 1], [1, 0]]
    torch.testing.assert_close(H.dense(), expected)


def test_linear_loss_has_no_curvature() -> None:
    criterion = gn.Loss(lambda h, y: (h * y).sum(), reduction="sum")
    H = geometry_of(criterion).hessian(torch.zeros(2, 3), torch.ones(2, 3))
    assert not H.total().any()


def test_loss_that_couples_data_is_refused() -> None:
    def variance(h: Tensor, _: Tensor) -> Tensor:
        return h.var(dim=0).sum()

    with pytest.raises(gn.errors.UnsupportedLossError, match="couples the data"):
        geometry_of(gn.Loss(variance)).hessian(torch.randn(4, 2), torch.zeros(4))


def test_loss_that_is_not_a_scalar_is_refused() -> None:
    criterion = gn.Loss(lambda h, y: (h - y).square())
    with pytest.raises(gn.errors.UnsupportedLossError, match="take its mean or sum"):
        gn.curvature(nn.Linear(2, 2), criterion, (torch.randn(3, 2), torch.randn(3, 2)))
    with pytest.raises((ValueError, TypeCheckError)):  # the second if annotations are checked
        gn.Loss(torch.dist, reduction="none")  # type: ignore[arg-type]


def test_plain_function_is_wrapped() -> None:
    model, batch = nn.Linear(3, 2), (torch.randn(4, 3), torch.randint(2, (4,)))
    plain = gn.curvature(model, nn.functional.cross_entropy, batch)[""].G
    torch.testing.assert_close(plain, gn.curvature(model, nn.CrossEntropyLoss(), batch)[""].G)


def test_unknown_criterion_is_named() -> None:
    class Mine(nn.CrossEntropyLoss):
        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return 2 * super().forward(outputs, targets)

    for criterion, name in ((nn.L1Loss(), "L1Loss"), (Mine(), "Mine")):
        with pytest.raises(gn.errors.UnsupportedLossError, match=rf"{name} has no.*gn\.Loss"):
            geometry_of(criterion)
    assert (
        relative(  # and the remedy works
            gn.curvature(nn.Linear(3, 2).double(), gn.Loss(Mine()), _batch())[""].Q,
            gn.curvature(nn.Linear(3, 2).double(), nn.CrossEntropyLoss(), _batch())[""].Q,
        )
        < 1e-12
    )


def _batch() -> tuple[Tensor, Tensor]:
    return torch.arange(12.0).reshape(4, 3).double(), torch.tensor([0, 1, 1, 0])
