"""Every estimator equals its exact counterpart, over functions × losses × reductions × depths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gaussnewton as gn
from tests.problems import (
    ELEMENTWISE,
    LOSSES,
    Network,
    kfra_by_hand,
    layer_inputs,
    moment_by_hand,
    network,
    relative,
)

TOLERANCE = 1e-10


def check_all(net: Network, criterion: torch.nn.Module, x: torch.Tensor, y: object) -> None:
    """KFLR's Q and G, the block Hessian, and KFRA's recursion, each against its slow twin."""
    batch = (x, y)
    exact_G = gn.exact.preactivation_gauss_newton(net, criterion, batch)
    exact_H = gn.exact.hessian_blocks(net, criterion, batch)
    slow_kfra = kfra_by_hand(net, criterion, x, y)
    kflr = gn.curvature(net, criterion, batch, method="kflr")
    kfra = gn.curvature(net, criterion, batch, method="kfra")
    hessian = gn.curvature(net, criterion, batch, method="hessian")
    assert list(kflr) == list(exact_G)
    inputs = layer_inputs(net, x)
    for name in kflr:
        bias = net.get_submodule(name).bias is not None
        Q = moment_by_hand(inputs[name], bias)
        for block in (kflr[name], kfra[name]):
            assert relative(block.Q, Q) < TOLERANCE, name
        assert close(kflr[name].G, exact_G[name]), name
        assert close(kfra[name].G, slow_kfra[name]), name
        assert close(hessian[name].matrix, exact_H[name]), name


def close(A: torch.Tensor, B: torch.Tensor) -> bool:
    return bool((A - B).norm() <= TOLERANCE * B.norm().clamp(min=1e-8))


@pytest.mark.parametrize("function", ELEMENTWISE)
@pytest.mark.parametrize("bias", [True, False])
def test_functions(function: str, bias: bool) -> None:
    net = network([4, 5, 3, 4], function, bias=bias)
    check_all(net, *_problem("cross-entropy", "mean", n=5, width=4, inputs=4))


@pytest.mark.parametrize(
    ("loss", "reduction"), [(name, r) for name, case in LOSSES.items() for r in case.reductions]
)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_losses(loss: str, reduction: str, depth: int) -> None:
    case = LOSSES[loss]
    width = case.outputs or 3
    net = network([*[3, 6, 2, 5][:depth], width], "nn.Tanh")
    check_all(net, *_problem(loss, reduction, n=4, width=width, inputs=3))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_network(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 10_000), label="seed"))
    loss = data.draw(st.sampled_from(sorted(LOSSES)), label="loss")
    case = LOSSES[loss]
    reduction = data.draw(st.sampled_from(case.reductions), label="reduction")
    depth = data.draw(st.integers(1, 4), label="depth")
    sizes = [data.draw(st.integers(1, 5), label="width") for _ in range(depth)]
    smallest = 2 if "entropy" in loss or "convex" in loss else 1
    sizes.append(case.outputs or data.draw(st.integers(smallest, 5), label="outputs"))
    functions = [
        data.draw(st.sampled_from(sorted(ELEMENTWISE)), label="function") for _ in range(depth - 1)
    ]
    biases = [data.draw(st.booleans(), label="bias") for _ in range(depth)]
    net = Network(sizes, [ELEMENTWISE[f] for f in functions], biases).double()
    n = data.draw(st.integers(1, 5), label="data")
    if "ignored" in loss:
        n = max(n, 2)
    check_all(net, *_problem(loss, reduction, n=n, width=sizes[-1], inputs=sizes[0]))


@pytest.mark.parametrize("loss", ["mse", "cross-entropy", "bce", "mixture", "custom, not convex"])
@pytest.mark.parametrize("sizes", [[6, 9, 2, 8, 12], [5, 3, 3, 12], [4, 12, 7, 12]])
def test_wide_outputs_and_bottlenecks(loss: str, sizes: list[int]) -> None:
    """More outputs than units, so that matrices are carried whole and factorised anew."""
    width = LOSSES[loss].outputs or sizes[-1]
    net = network([*sizes[:-1], width], "nn.Sigmoid")
    criterion, x, y = _problem(loss, "mean", n=6, width=width, inputs=sizes[0])
    exact = gn.exact.preactivation_gauss_newton(net, criterion, (x, y))
    for workspace in (1, 4000, 2**20):
        kflr = gn.curvature(net, criterion, (x, y), method=gn.KFLR(workspace=workspace))
        for name, G in exact.items():
            assert close(kflr[name].G, G), (name, workspace)


def test_bottleneck_of_dead_units() -> None:
    """A matrix that is singular at the bottleneck has no Cholesky factor."""
    net = network([4, 6, 3, 6, 8], "F.relu")
    with torch.no_grad():
        net.layers[1].bias.fill_(-100.0)  # kills the three units of the bottleneck
        net.layers[1].bias[0] = 1.0
    criterion, x, y = _problem("bce", "mean", n=5, width=8, inputs=4)
    exact = gn.exact.preactivation_gauss_newton(net, criterion, (x, y))
    kflr = gn.curvature(net, criterion, (x, y))
    for name, G in exact.items():
        assert close(kflr[name].G, G), name


@pytest.mark.parametrize("method", ["kflr", "kfra", "kfac"])
def test_float32_and_bfloat16_keep_wide_factors(method: str) -> None:
    criterion, x, y = _problem("cross-entropy", "mean", n=8, width=3, inputs=4)
    net = network([4, 6, 3], "nn.Tanh")
    wide = gn.curvature(net, criterion, (x, y), method=method)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        narrow = gn.curvature(net.to(dtype), criterion, (x.to(dtype), y), method=method)
        for name in wide:
            assert narrow[name].G.dtype == narrow[name].Q.dtype == torch.float32
            assert relative(narrow[name].Q.double(), wide[name].Q) < tolerance
            if method != "kfac":  # whose draws differ with the rounding of the outputs
                assert relative(narrow[name].G.double(), wide[name].G) < tolerance


def _problem(
    loss: str, reduction: str, *, n: int, width: int, inputs: int
) -> tuple[torch.nn.Module, torch.Tensor, object]:
    case = LOSSES[loss]
    x = torch.randn(n, inputs, dtype=torch.float64)
    return case.make(reduction), x, case.targets(n, width)
