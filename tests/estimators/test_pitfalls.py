"""Cases in which a careless estimator is silently wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm

import gaussnewton as gn
from tests.problems import network, relative

F64 = torch.float64


class Between(nn.Module):
    """Two layers with a function between."""

    def __init__(self, function, inputs: int = 4, width: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(inputs, width), nn.Linear(width, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


def errors(model: nn.Module, criterion: nn.Module, batch: object) -> dict[str, float]:
    """The largest relative error of KFLR's G and of the Hessian, over layers."""
    kflr = gn.curvature(model, criterion, batch)
    hessian = gn.curvature(model, criterion, batch, method="hessian")
    G = gn.exact.preactivation_gauss_newton(model, criterion, batch)
    H = gn.exact.hessian_blocks(model, criterion, batch)
    return {
        "G": max(relative(kflr[name].G, G[name]) for name in G),
        "H": max(relative(hessian[name].dense(), H[name]) for name in H),
    }


def test_bias_registered_before_the_weight() -> None:
    model = Between(torch.tanh).double()
    prune.l1_unstructured(model.a, "weight", 0.3)
    prune.remove(model.a, "weight")
    assert list(model.a._parameters) == ["bias", "weight"]
    batch = torch.randn(6, 4).double(), torch.randn(6, 3).double()
    assert max(errors(model, nn.MSELoss(), batch).values()) < 1e-10
    v = torch.randn(gn.Theta(model).size, dtype=F64)
    kflr = gn.curvature(model, nn.MSELoss(), (batch[0][:1], batch[1][:1]))
    exact = gn.exact.gauss_newton_blocks(model, nn.MSELoss(), (batch[0][:1], batch[1][:1]))
    assert relative(kflr @ v, torch.block_diag(*exact.values()) @ v) < 1e-10


@pytest.mark.parametrize("change", ["prune", "spectral norm", "own forward"])
def test_linear_layers_that_are_no_plain_linear_layers(change: str) -> None:
    model = Between(torch.tanh)
    if change == "prune":
        prune.l1_unstructured(model.a, "weight", 0.3)
    elif change == "spectral norm":
        spectral_norm(model.a)
    else:
        model.a.forward = lambda x: 2 * nn.Linear.forward(model.a, x)
    model = model.double().eval()  # spectral norm takes a step of its iteration in each pass
    batch = torch.randn(3, 4).double(), torch.randn(3, 3).double()
    found = gn.curvature(model, nn.MSELoss(), batch)
    exact = gn.exact.gauss_newton_blocks(model, nn.MSELoss(), batch)
    (name,) = [
        group.name
        for group in found.theta
        if group.module.startswith("a") and "weight" in group.part
    ]
    block = found[name]
    if change == "own forward":  # a product all the same
        assert block.kind == "Kronecker"
    else:  # a function of the parameter is not the parameter
        assert block.kind == "diagonal"
        assert relative(block.dense().diagonal(), exact[name].diagonal()) < 1e-9


@pytest.mark.parametrize("function", [lambda h: h * h.flip(1), lambda h: h + h * h.flip(1)])
def test_elementwise_at_this_point_only(function) -> None:
    """With a zero layer in front the Jacobian is diagonal and the second derivative is not."""
    model = Between(function).double()
    nn.init.zeros_(model.a.weight)
    nn.init.zeros_(model.a.bias)
    batch = torch.randn(6, 4).double(), torch.randn(6, 3).double()
    assert errors(model, nn.MSELoss(), batch)["H"] < 1e-10


def test_one_large_datum_does_not_hide_coupling_in_the_others() -> None:
    model = Between(lambda h: h.exp() + h.flip(1), inputs=4)
    with torch.no_grad():
        model.a.weight.copy_(torch.eye(4))
    x = torch.randn(6, 4)
    x[0] = 13
    y = torch.rand(6, 3)
    G = gn.curvature(model, nn.MSELoss(), (x, y))["a"].G
    wide = gn.curvature(model.double(), nn.MSELoss(), (x.double(), y.double()))["a"].G
    assert relative(G.double()[0:], wide) < 1e-4
    others = gn.curvature(model.float(), nn.MSELoss(), (x[1:], y[1:]))["a"].G.double()
    exact = gn.exact.preactivation_gauss_newton(
        model.double(), nn.MSELoss(), (x[1:].double(), y[1:].double())
    )["a"]
    assert relative(others, exact) < 1e-4


@pytest.mark.parametrize("n", [2, 4, 6, 8, 20])
def test_neighbours_that_are_mixed(n: int) -> None:
    model = Between(lambda h: (h.view(-1, 2, 4) + 0.5 * h.view(-1, 2, 4).flip(1)).view(-1, 4))
    batch = torch.randn(n, 4), torch.randn(n, 3)
    with pytest.raises(gn.errors.UnsupportedGraphError, match="mixes the data"):
        gn.curvature(model, nn.MSELoss(), batch)
    pairs = gn.Loss(lambda h, _: (h.view(-1, 2, 3).prod(1) ** 2).mean())
    with pytest.raises(gn.errors.UnsupportedLossError, match="couples the data"):
        gn.curvature(nn.Linear(4, 3), pairs, batch)


@pytest.mark.parametrize("value", [float("inf"), 1e25])
@pytest.mark.parametrize("method", ["kflr", "kfra", "kfac", "hessian"])
def test_non_finite_input_behind_a_saturating_function(value: float, method: str) -> None:
    x = torch.randn(5, 4)
    x[0, 0] = value
    with pytest.raises(gn.errors.NonFiniteError, match=r"layer 'layers\.0'"):
        gn.curvature(
            network([4, 5, 3], dtype=torch.float32), nn.MSELoss(), (x, torch.randn(5, 3)), method
        )


@pytest.mark.parametrize(
    ("criterion", "targets"),
    [
        (nn.CrossEntropyLoss(torch.tensor([1.0, -0.3, 1.0]).double()), torch.tensor([0, 1, 2, 1])),
        (nn.CrossEntropyLoss(), torch.randn(4, 3).double()),
        (nn.BCEWithLogitsLoss(torch.tensor([1.0, -1.0, 2.0]).double()), torch.rand(4, 3).double()),
        (
            nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0, 3.0, 3.0]).double()),
            torch.full((4, 3), -2.0).double(),
        ),
    ],
)
def test_negative_weights_leave_the_psd_part(criterion: nn.Module, targets: Tensor) -> None:
    net, x = network([4, 5, 3]), torch.randn(4, 4).double()
    exact = gn.exact.preactivation_gauss_newton(net, criterion, (x, targets))
    kflr = gn.curvature(net, criterion, (x, targets))
    for name, G in exact.items():
        torch.testing.assert_close(kflr[name].G, G, rtol=1e-10, atol=1e-14)
    assert gn.curvature(net, criterion, (x, targets), method="kfac")["layers.0"].G.isfinite().all()


class Once(torch.autograd.Function):
    """A cube whose derivative cannot be differentiated."""

    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (h,) = ctx.saved_tensors
        return 3 * h**2 * g


class Branches(torch.autograd.Function):
    """A backward that looks at values, which no batching rule allows."""

    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h.flip(1) * 2

    @staticmethod
    def backward(_ctx, g):
        return g.flip(1) * (2 if bool(g.sum() != 12345) else 3)


def test_custom_functions() -> None:
    batch = torch.randn(6, 4).double(), torch.randn(6, 3).double()
    once = Between(Once.apply).double()
    exact = gn.exact.preactivation_gauss_newton(
        Between(lambda h: h**3).double().requires_grad_(True), nn.MSELoss(), batch
    )
    assert exact  # the cube itself is no problem
    G = gn.curvature(once, nn.MSELoss(), batch)["a"].G
    truth = gn.exact.preactivation_gauss_newton(once, nn.MSELoss(), batch)["a"]
    assert relative(G, truth) < 1e-10
    with pytest.raises(gn.errors.UnsupportedGraphError, match="once_differentiable"):
        gn.curvature(once, nn.MSELoss(), batch, method="hessian")
    branches = Between(Branches.apply).double()
    G = gn.curvature(branches, nn.MSELoss(), batch)["a"].G
    truth = gn.exact.preactivation_gauss_newton(branches, nn.MSELoss(), batch)["a"]
    assert relative(G, truth) < 1e-10


def test_criterion_with_parameters_of_the_model() -> None:
    model = Between(torch.tanh)
    penalty = gn.Loss(lambda h, y: (h - y).square().mean() + model.a.weight.square().sum())
    with pytest.raises(
        gn.errors.UnsupportedGraphError, match=r"'a.weight' is used before the loss"
    ):
        gn.curvature(model, penalty, (torch.randn(3, 4), torch.randn(3, 3)))


def test_plain_function_over_several_batches_must_say_what_it_does() -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.randint(3, (6,))

    def summed(h: Tensor, t: Tensor) -> Tensor:
        return nn.functional.cross_entropy(h, t, reduction="sum")

    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    with pytest.raises(gn.errors.UnsupportedLossError, match="sums or averages"):
        gn.curvature(model, summed, batches)
    together = gn.curvature(model, gn.Loss(summed, reduction="sum"), batches)[""].G
    torch.testing.assert_close(together, gn.curvature(model, summed, (x, y))[""].G)


@pytest.mark.parametrize("method", ["kflr", "kfra", "kfac", "hessian"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: (nn.CrossEntropyLoss(), torch.rand(6, 3).softmax(1).to(dtype)),
        lambda dtype: (nn.CrossEntropyLoss(torch.rand(3).to(dtype)), torch.randint(3, (6,))),
        lambda dtype: (nn.BCEWithLogitsLoss(torch.rand(3).double()), torch.rand(6, 3).to(dtype)),
        lambda dtype: (
            nn.GaussianNLLLoss(),
            (torch.rand(6, 3).to(dtype), torch.ones(6, 3).to(dtype)),
        ),
        lambda dtype: (nn.MSELoss(), torch.rand(6, 3).to(dtype)),
    ],
)
def test_dtypes_are_brought_together(make, dtype: torch.dtype, method: str) -> None:
    net = network([4, 5, 3], dtype=dtype)
    criterion, targets = make(dtype)
    x = torch.randn(6, 4).to(dtype)
    for block in gn.curvature(net, criterion, (x, targets), method=method).values():
        assert block.dense().dtype == torch.float32


@pytest.mark.parametrize("method", ["kflr", "kfra", "kfac", "hessian"])
def test_autocast_does_not_reach_the_estimators(method: str) -> None:
    net, x, y = network([8, 16, 3], dtype=torch.float32), torch.randn(9, 8), torch.randn(9, 3)
    plain = gn.curvature(net, nn.MSELoss(), (x, y), method=method)
    with torch.autocast("cpu", torch.bfloat16):
        cast = gn.curvature(net, nn.MSELoss(), (x, y), method=method)
    for name in plain:
        assert cast[name].dense().dtype == torch.float32
        assert relative(cast[name].trace(), plain[name].trace()) < 0.05


def test_frozen_layer_on_more_dimensions_is_part_of_the_way() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.shared, self.b = nn.Linear(4, 6), nn.Linear(3, 3), nn.Linear(6, 2)
            self.shared.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.shared(self.a(x).view(-1, 2, 3)).tanh().flatten(1))

    batch = torch.randn(5, 4).double(), torch.randn(5, 2).double()
    assert max(errors(Model().double(), nn.MSELoss(), batch).values()) < 1e-10


def test_criterion_called_by_keywords() -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randn(5, 3)
    for criterion, call in (
        (nn.MSELoss(), lambda c: c(model(x), target=y)),
        (nn.MSELoss(), lambda c: c(target=y, input=model(x))),
        (nn.GaussianNLLLoss(), lambda c: c(model(x), y, var=torch.ones(5, 3))),
    ):
        with gn.Tape(model, criterion) as tape:
            call(criterion)
        assert gn.KFLR()(tape.record)[""].G.isfinite().all()
