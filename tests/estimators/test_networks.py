"""Networks written in other ways than a plain chain of elementwise functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gaussnewton as gn
from tests.problems import relative


def check(model: nn.Module, criterion: nn.Module, x: Tensor, y: object) -> None:
    """KFLR and the Hessian against autograd, with the same random numbers in each."""
    results = []
    for compute in (
        lambda: gn.exact.preactivation_gauss_newton(model, criterion, (x, y)),
        lambda: gn.curvature(model, criterion, (x, y), method="kflr"),
        lambda: gn.curvature(model, criterion, (x, y), method=gn.KFLR(workspace=1)),
        lambda: gn.exact.hessian_blocks(model, criterion, (x, y)),
        lambda: gn.curvature(model, criterion, (x, y), method="hessian"),
    ):
        torch.manual_seed(11)
        results.append(compute())
    G, kflr, chunked, H, hessian = results
    assert list(G) == list(kflr)
    for name in G:
        assert relative(kflr[name].G, G[name]) < 1e-10, name
        assert relative(chunked[name].G, G[name]) < 1e-10, name
        assert relative(hessian[name].matrix, H[name]) < 1e-10, name


class HandWritten(nn.Module):
    """Reshapes, dropout, identities, functional calls and in-place work, in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.middle = nn.Linear(8, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, image: Tensor) -> Tensor:
        h = self.encoder(image.flatten(1))
        h = self.middle(h).view(-1, 2, 3)
        h = F.dropout(nn.Identity()(h.tanh()), 0.2, training=True)
        return self.head(input=h.reshape(len(image), -1))


def test_hand_written_forward() -> None:
    x, y = torch.randn(7, 2, 3).double(), torch.randint(3, (7,))
    check(HandWritten().double(), nn.CrossEntropyLoss(), x, y)


def test_log_softmax_with_nll_is_cross_entropy() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(6, 4).double(), torch.randint(3, (6,))
    weight = torch.tensor([0.5, 1.0, 2.0]).double()
    model = nn.Sequential(*body, nn.LogSoftmax(dim=1))
    for method in ("kflr", "kfra", "hessian"):
        nll = gn.curvature(model, nn.NLLLoss(weight), (x, y), method=method)
        ce = gn.curvature(body, nn.CrossEntropyLoss(weight), (x, y), method=method)
        for name in ce:
            assert relative(nll[name].dense(), ce[name].dense()) < 1e-10, (method, name)
    check(model, nn.NLLLoss(weight, ignore_index=1), x, y)


@pytest.mark.parametrize(
    "function",
    [
        lambda h: h.softmax(1),
        lambda h: h[:, torch.tensor([3, 1, 0, 2, 5, 4])],
        lambda h: h.view(-1, 2, 3).transpose(1, 2).flatten(1),
        lambda h: F.layer_norm(h, (6,)),
        lambda h: torch.cat([h.tanh(), h.sin()], dim=1)[:, ::2],
        lambda h: F.max_pool1d(h.unsqueeze(1), 2, padding=1).flatten(1),
        lambda h: h[:, :3] * h[:, 3:].sigmoid(),
    ],
    ids=["softmax", "index", "transpose", "layer norm", "concatenation", "pooling", "gate"],
)
def test_functions_that_are_not_elementwise(function) -> None:
    class Model(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(width, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(function(self.a(x))).tanh())

    width = function(torch.randn(2, 6)).shape[1]
    model = Model(width).double()
    x, y = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    check(model, nn.MSELoss(), x, y)
    # KFRA passes the expected matrix through: exact for one datum.
    one = (x[:1], y[:1])
    kfra, kflr = (gn.curvature(model, nn.MSELoss(), one, method=m) for m in ("kfra", "kflr"))
    for name in kflr:
        assert relative(kfra[name].G, kflr[name].G) < 1e-10


def test_kfra_through_a_general_function_is_the_average_over_data() -> None:
    layers = nn.Linear(3, 4), nn.Softmax(dim=1), nn.Linear(4, 2)
    model = nn.Sequential(*layers).double()
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    kfra = gn.curvature(model, nn.MSELoss(), (x, y), method="kfra")
    W, expected = model[2].weight.detach(), torch.zeros(4, 4).double()
    for h in model[0](x).detach():
        J = torch.autograd.functional.jacobian(lambda v: v.softmax(0), h)
        expected += J.T @ W.T @ kfra["2"].G @ W @ J / len(x)
    assert relative(kfra["0"].G, expected) < 1e-10


def test_outputs_with_extra_dimensions() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3 * 2 * 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh()).view(-1, 3, 2, 2)

    model, x = Positions().double(), torch.randn(4, 4).double()
    y = torch.randint(3, (4, 2, 2))
    weight = torch.tensor([0.5, 1.0, 2.0]).double()
    check(model, nn.CrossEntropyLoss(weight, ignore_index=2, label_smoothing=0.1), x, y)
    check(model, nn.CrossEntropyLoss(), x, torch.rand(4, 3, 2, 2).double().softmax(1))
    check(model, nn.BCEWithLogitsLoss(reduction="sum"), x, torch.rand(4, 3, 2, 2).double())


def test_activation_behind_the_last_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2), nn.Sigmoid()).double()
    check(model, nn.MSELoss(), torch.randn(5, 4).double(), torch.rand(5, 2).double())
    rate = nn.Sequential(nn.Linear(4, 2), nn.Softplus()).double()
    y = torch.poisson(torch.full((5, 2), 2.0)).double()
    check(rate, nn.PoissonNLLLoss(log_input=False), torch.randn(5, 4).double(), y)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_predicted_variance(reduction: str) -> None:
    class MeanAndVariance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mean, raw = self.b(self.a(x).tanh()).chunk(2, dim=1)
            return mean, F.softplus(raw) + 0.1

    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    check(MeanAndVariance().double(), nn.GaussianNLLLoss(reduction=reduction), x, y)


def test_frozen_parts() -> None:
    model = nn.Sequential(
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(),
        nn.Linear(4, 3),
    ).double()  # fmt: skip
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model[4].requires_grad_(False)
    model[6].weight.requires_grad_(False)
    x, y = torch.randn(5, 4).double(), torch.randint(3, (5,))
    check(model, nn.CrossEntropyLoss(), x, y)
    curvature = gn.curvature(model, nn.CrossEntropyLoss(), (x, y))
    assert list(curvature) == ["2", "6"]
    assert curvature["2"].Q.shape == (5, 5)  # no column for the frozen bias
    assert torch.equal(curvature["6"].Q, torch.ones(1, 1).double())


def test_inputs_as_arguments_and_keywords() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.layer(torch.cat([left, right], dim=1))

    model, y = Two(), torch.randn(5, 2)
    left, right = torch.randn(5, 1), torch.randn(5, 3)
    plain = gn.curvature(model, nn.MSELoss(), ((left, right), y))["layer"].Q
    named = gn.curvature(model, nn.MSELoss(), ({"right": right, "left": left}, y))["layer"].Q
    assert torch.equal(plain, named)


def test_subclass_of_linear_that_computes_the_same() -> None:
    class Mine(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    batch = torch.randn(3, 2), torch.randn(3, 2)
    assert list(gn.curvature(nn.Sequential(Mine(2, 2)), nn.MSELoss(), batch)) == ["0"]
    # The product inside is seen, and the 2 lies behind it.
    plain, other = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(Other(2, 2))
    other.load_state_dict(plain.state_dict())
    expected, found = (gn.curvature(m, nn.MSELoss(), batch)["0"] for m in (plain, other))
    torch.testing.assert_close(found.Q, expected.Q)
    torch.testing.assert_close(found.G, 4 * expected.G)
