"""Factors in float64 for models in float32, and inverses in as few digits as will do."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton import precision
from gaussnewton.blocks import KroneckerBlock
from gaussnewton.errors import GaussNewtonError
from gaussnewton.progress import Progress
from gaussnewton.running import careful_inverse
from tests.models import Case, cases
from tests.problems import ELEMENTWISE, LOSSES, fit, network, relative

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16

ESTIMATORS = {"kflr": gn.KFLR, "kfra": gn.KFRA, "kfac": gn.KFAC}


def in_float32(part: Any) -> Any:
    """Floating-point tensors of a batch in float32."""
    if isinstance(part, tuple):
        return tuple(in_float32(p) for p in part)
    return part.float() if isinstance(part, Tensor) and part.is_floating_point() else part


def check_wide(net: nn.Module, criterion: nn.Module, x: Any, y: Any) -> None:
    """Factors of a float32 model in float64 are as near to those of a float64 one as x is.

    KFAC's draws differ with rounding, but not with the precision of factors.
    """
    narrow = copy.deepcopy(net).float(), copy.deepcopy(criterion).float(), in_float32((x, y))
    exact = {
        method: gn.curvature(net.double(), criterion.double(), (x, y), method=method)
        for method in ("kflr", "kfra")
    }
    for method, make in ESTIMATORS.items():
        wide = gn.curvature(*narrow, method=make(precision=F64))
        plain = gn.curvature(*narrow, method=make())
        for name in wide:
            assert {part.dtype for part in wide[name].numbers().values()} == {F64}
            assert {part.dtype for part in plain[name].numbers().values()} == {F32}
            near = exact.get(method, plain)[name].dense().double()
            assert relative(wide[name].dense(), near) < 2e-5, (method, name)


@pytest.mark.parametrize("function", ELEMENTWISE)
def test_factors_of_a_chain_in_float64(function: str) -> None:
    net = network([5, 6, 4, 3], function)
    check_wide(net, nn.MSELoss(), torch.randn(8, 5).double(), torch.randn(8, 3).double())


@pytest.mark.parametrize("loss", LOSSES)
def test_factors_for_each_loss_in_float64(loss: str) -> None:
    case = LOSSES[loss]
    net = network([5, 6, case.outputs or 4])
    x, y = torch.randn(9, 5).double(), case.targets(9, case.outputs or 4)
    check_wide(net, case.make("mean"), x, y)


@pytest.mark.parametrize("eigenvalues", ["factored", "corrected"])
@pytest.mark.parametrize("name", ["LeNet", "ResNet", "U-Net", "LSTM", "siamese", "DenseNet"])
def test_factors_of_networks_in_float64(name: str, eigenvalues: Any) -> None:
    case: Case = cases()[name]
    torch.manual_seed(0)
    model = case.model().float()
    methods = [gn.KFAC(precision=F64, eigenvalues=eigenvalues)]
    if name != "ResNet":
        methods.append(gn.KFLR(precision=F64, eigenvalues=eigenvalues))
    if name in ("LeNet", "DenseNet", "ResNet") and eigenvalues == "factored":
        methods.append(gn.KFRA(precision=F64))
    inputs, targets = in_float32(case.inputs), in_float32(case.targets)
    for method in methods:
        batch = inputs if len(inputs) > 1 else inputs[0], targets[0]
        curvature = gn.curvature(model, case.criterion, batch, method=method)
        for key in curvature:
            assert {p.dtype for p in curvature[key].numbers().values()} == {F64}, (method, key)


def test_float64_resolves_what_float32_does_not() -> None:
    """Inputs that nearly depend on each other, to the last digits of float32."""
    torch.manual_seed(0)
    x = torch.randn(400, 3) @ torch.randn(3, 12) + 1e-4 * torch.randn(400, 12)
    net, y = nn.Linear(12, 2, bias=False), torch.randn(400, 2)
    exact = torch.linalg.eigvalsh(x.double().T @ x.double() / 400)
    errors = {}
    for dtype in (F32, F64):
        block = gn.curvature(net, nn.MSELoss(), (x, y), method=gn.KFLR(precision=dtype))[""]
        found = torch.linalg.eigvalsh(block.Q.double())
        errors[dtype] = float((found - exact).abs()[:9].max() / exact[0])
    assert errors[F32] > 0.5
    assert errors[F64] < 1e-4


def test_precision_outside_is_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), precision.factors_in(F64):
        _ = 1 / 0
    assert precision.widened(torch.ones(1)).dtype == F32
    assert precision.widened(torch.ones(1).bfloat16()).dtype == F32
    assert precision.widened(torch.ones(1).double()).dtype == F64


def test_an_estimator_keeps_a_wider_precision_of_its_own() -> None:
    for make in ESTIMATORS.values():
        assert make().with_precision(F64).precision == F64
        assert make(precision=F64).with_precision(F32).precision == F64
        with pytest.raises(ValueError, match=r"torch.float32 or torch.float64, not torch.float16"):
            make(precision=torch.float16)


def test_condition_is_the_mean_eigenvalue_times_the_spread_of_inverses() -> None:
    torch.manual_seed(0)
    values = torch.tensor([5.0, 1.0, 1e-3, 1e-5]).double()
    U = torch.linalg.qr(torch.randn(4, 4).double()).Q
    kappa = precision.condition(values.mean(), U @ torch.diag(1 / values) @ U.T)
    assert kappa == pytest.approx(float(values.mean() * (values**-2).mean().sqrt()))
    assert precision.condition(values.mean(), torch.full((4, 4), torch.inf)) == torch.inf
    assert precision.condition(values.mean(), torch.full((4, 4), torch.nan)) == torch.inf


def test_rounding_a_factor_errs_by_about_what_condition_says() -> None:
    """In coordinates in which the factor is the identity, per direction."""
    torch.manual_seed(0)
    U = torch.linalg.qr(torch.randn(300, 300).double()).Q
    M = U @ torch.diag(torch.logspace(0, -5, 300).double()) @ U.T
    values, U = torch.linalg.eigh(M)
    root, inverse = U @ torch.diag(values.sqrt()) @ U.T, torch.linalg.inv(M)
    kappa = precision.condition(M.trace() / 300, inverse)
    error = root @ (inverse.bfloat16().double() - inverse) @ root
    measured = float(error.norm() / 300**0.5)
    assert 0.1 < measured / (kappa * torch.finfo(BF16).eps / 2) < 1


def kronecker(spread: float, d: int = 300, e: int = 280) -> KroneckerBlock:
    torch.manual_seed(0)
    a = torch.randn(1000, d) * torch.logspace(0, -spread, d)
    return KroneckerBlock(a.T @ a / 1000, torch.eye(e) + 0.1)


@pytest.mark.parametrize(
    ("spread", "expected"), [(0.3, (BF16, BF16)), (1.5, (F32, BF16)), (3.6, (F64, BF16))]
)
def test_inverses_are_applied_in_as_few_digits_as_will_do(
    spread: float, expected: tuple[torch.dtype, torch.dtype]
) -> None:
    block, V = kronecker(spread).double(), torch.randn(280, 300)
    exact = block.invert(1e-14, "factored")
    fitted = exact.multiplied_out([BF16, F32])
    assert (fitted.Q_inverse.dtype, fitted.G_inverse.dtype) == expected
    assert fitted.solve(V).dtype == (F64 if expected[0] == F64 else F32)
    found, wanted = block @ fitted.solve(V).double(), block @ exact.solve(V.double())
    assert relative(found, wanted) < 0.1
    assert exact.multiplied_out().Q_inverse.dtype == F64
    torch.testing.assert_close(fitted.logdet().double(), exact.logdet(), rtol=1e-2, atol=0.0)
    assert fitted.sample(torch.Generator().manual_seed(0)).shape == V.shape


def test_narrow_factors_gain_nothing_by_bfloat16() -> None:
    block = kronecker(0.3, d=40, e=280)
    fitted = block.invert(1e-2, "factored").multiplied_out([BF16, F32])
    assert (fitted.Q_inverse.dtype, fitted.G_inverse.dtype) == (F32, BF16)


def dependent(n: int = 200, wide: int = 30) -> tuple[nn.Module, Tensor, Tensor]:
    """Regression on inputs that nearly depend on each other; what is to be learnt lies there."""
    torch.manual_seed(0)
    U, V = torch.linalg.qr(torch.randn(n, wide)).Q, torch.linalg.qr(torch.randn(wide, wide)).Q
    x = U * torch.logspace(1, -4, wide) @ V.T * n**0.5
    net = nn.Sequential(nn.Linear(wide, 20), nn.Tanh(), nn.Linear(20, 2))
    return net, x, (U[:, -2:] * n**0.5).clone()


SMALL = {"damping": gn.Damping(tau=1e-15, lower_above=1e9), "curvature": "kfra"}


def blocks_dtype(optimizer: gn.GaussNewton) -> set[torch.dtype]:
    return {part.dtype for b in optimizer._blocks().values() for part in b.numbers().values()}


def test_where_damping_is_too_small_for_float32_factors_are_float64() -> None:
    net, x, y = dependent()
    optimizer = gn.GaussNewton(net, nn.MSELoss(), **SMALL)
    fit(optimizer, x, y, 9)
    assert not optimizer.diagnostics["wide"]
    assert blocks_dtype(optimizer) == {F32}
    fit(optimizer, x, y, 71)
    assert optimizer.diagnostics["wide"]
    assert blocks_dtype(optimizer) == {F64}
    worst = max(optimizer._inverses.values(), key=lambda inverse: inverse.condition)
    assert worst.condition > 1e6
    assert worst.Q_inverse.dtype == F64
    assert next(net.parameters()).dtype == F32


def test_with_enough_damping_they_stay_as_they_are() -> None:
    net, x, y = dependent()
    optimizer = gn.GaussNewton(net, nn.MSELoss(), damping=gn.Damping(tau=1e-3, lower_above=1e9))
    fit(optimizer, x, y, 30)
    assert not optimizer.diagnostics["wide"]
    assert blocks_dtype(optimizer) == {F32}


def test_float64_learns_what_float32_cannot() -> None:
    """Targets in directions with a hundred-millionth of the inputs' variance."""
    losses = {}
    for wanted in ("float32", "auto", "float64"):
        net, x, y = dependent()
        optimizer = gn.GaussNewton(net, nn.MSELoss(), **SMALL, refresh=gn.Refresh(precision=wanted))
        losses[wanted] = fit(optimizer, x, y, 100)[-1]
    assert losses["auto"] < 0.5 * losses["float32"]
    assert losses["float64"] < 0.5 * losses["float32"]


@pytest.mark.parametrize(("wanted", "expected"), [("float32", F32), ("float64", F64)])
def test_a_precision_that_is_asked_for_is_kept(wanted: Any, expected: torch.dtype) -> None:
    net, x, y = dependent()
    optimizer = gn.GaussNewton(net, nn.MSELoss(), **SMALL, refresh=gn.Refresh(precision=wanted))
    for _ in range(4):
        fit(optimizer, x, y, 5)
        assert blocks_dtype(optimizer) == {expected}


def test_other_words_for_precision_are_refused() -> None:
    with pytest.raises((ValueError, TypeCheckError), match="'double'"):
        gn.Refresh(precision="double")  # type: ignore[arg-type]


def resumed(optimizer: gn.GaussNewton) -> gn.GaussNewton:
    """A new optimiser for a copy of the model, from what was written to a file."""
    file = io.BytesIO()
    torch.save((optimizer.model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    twin = copy.deepcopy(optimizer.model)
    twin.load_state_dict(weights)
    again = gn.GaussNewton(twin, nn.MSELoss(), **SMALL)
    again.load_state_dict(state)
    return again


@pytest.mark.parametrize("updates", [8, 11, 20])
def test_a_run_goes_on_bit_for_bit_before_and_after_it_became_wide(updates: int) -> None:
    net, x, y = dependent()
    optimizer = gn.GaussNewton(net, nn.MSELoss(), **SMALL)
    fit(optimizer, x, y, updates)
    again = resumed(optimizer)
    assert fit(optimizer, x, y, 15) == fit(again, x, y, 15)
    assert again.diagnostics["wide"]


def wide_problem(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 260), nn.Tanh(), nn.Linear(260, 3)).to(dtype)
    x = torch.randn(500, 300, dtype=dtype)
    return net, x, x[:, :3] * x[:, 3:6]


def test_bfloat16_is_used_where_it_pays_and_does_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, applied = {}, {}
    for pays in (False, True):
        monkeypatch.setattr("gaussnewton.curved.bfloat16_pays", lambda _, pays=pays: pays)
        net, x, y = wide_problem(F32)
        optimizer = gn.GaussNewton(net, nn.MSELoss(), curvature="kfra")
        losses[pays] = fit(optimizer, x, y, 25)[-1]
        applied[pays] = {
            M.dtype
            for inverse in optimizer._inverses.values()
            for M in (inverse.Q_inverse, inverse.G_inverse)
        }
        assert optimizer.param_groups[0]["progress"]["narrow"] is pays
        # A resumed run stays with what it began with, also on another machine.
        monkeypatch.setattr("gaussnewton.curved.bfloat16_pays", lambda _, pays=pays: not pays)
        again = gn.GaussNewton(copy.deepcopy(net), nn.MSELoss(), curvature="kfra")
        again.load_state_dict(optimizer.state_dict())
        assert fit(again, x, y, 6) == fit(optimizer, x, y, 6)
    assert applied == {False: {F32}, True: {F32, BF16}}
    assert losses[True] == pytest.approx(losses[False], rel=0.05)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_no_digits_are_left_out_where_none_may_be(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a model of float64, and where float32 is asked for."""
    monkeypatch.setattr("gaussnewton.curved.bfloat16_pays", lambda _: True)
    net, x, y = wide_problem(dtype)
    refresh = gn.Refresh(precision="float32" if dtype == F32 else "auto")
    optimizer = gn.GaussNewton(net, nn.MSELoss(), refresh=refresh)
    fit(optimizer, x, y, 12)
    for inverse in optimizer._inverses.values():
        assert {inverse.Q_inverse.dtype, inverse.G_inverse.dtype} == {dtype}


def test_whether_bfloat16_pays_is_found_once() -> None:
    device = torch.device("cpu")
    assert precision.bfloat16_pays(device) is precision.bfloat16_pays(device)


def test_a_factor_that_rounding_made_indefinite_is_mended_by_a_little_damping() -> None:
    """With nothing to fall back to, as in a run that goes on from a file."""
    torch.manual_seed(0)
    a = torch.randn(100, 8)
    Q = a.T @ a / 100
    values, U = torch.linalg.eigh(Q)
    values[0] = -1e-5 * values[-1]
    block, progress = KroneckerBlock(U @ torch.diag(values) @ U.T, torch.eye(3)), Progress()
    V = torch.randn(3, 8)
    solved = careful_inverse("0", block, 1e-20, "factored", [], None, progress).solve(V)
    assert progress.mended > 0
    soft = U[:, 0]
    stiff = (torch.eye(8) - torch.outer(soft, soft)).double()
    wanted = V.double() @ (U[:, 1:] / values[1:] @ U[:, 1:].T).double()
    assert relative(solved.double() @ stiff, wanted @ stiff) < 1e-2
    assert solved.isfinite().all()
    hopeless = KroneckerBlock(-torch.eye(8), torch.eye(3))
    with pytest.raises(GaussNewtonError, match="layer '0' could not be inverted"):
        careful_inverse("0", hopeless, 1e-20, "factored", [], None, progress)
    last = block.invert(1.0)
    assert careful_inverse("0", hopeless, 1e-20, "factored", [], last, progress) is last
