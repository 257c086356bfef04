"""KFLR and KFAC on networks that are no chains, beside slow re-statements and exact blocks."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor, nn

import gaussnewton as gn
from tests.problems import relative


class Residual(nn.Module):
    """x + f(x), a branch that is concatenated, and a layer that is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.side, self.last = nn.Linear(4, 2), nn.Linear(6, 3)
        self.unused = nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.first(x))
        x = x + self.second(x.sigmoid())
        return self.last(torch.cat([x, self.side(x).relu()], dim=1))


class Images(nn.Module):
    """A small convolutional network with groups, dilation, pooling and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 2, groups=2, dilation=2, bias=False),
            nn.Tanh(),
            nn.Flatten(),
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.middle(torch.tanh(self.middle(x)))))


class AgainFirst(nn.Module):
    """Layers of which the ones that are met last on the way back have been met before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.first(torch.tanh(self.middle(x)))))


def residual(n: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Residual().double(), (torch.randn(n, 4).double(), torch.randint(3, (n,)))


def images(n: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Images().double(), (torch.randn(n, 2, 8, 8).double(), torch.randint(3, (n,)))


def twice(n: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Twice().double(), (torch.randn(n, 3).double(), torch.randint(2, (n,)))


def again_first(n: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return AgainFirst().double(), (torch.randn(n, 3).double(), torch.randint(2, (n,)))


def slow_factors(
    model: nn.Module, name: str, criterion: nn.Module, batch: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Q and G of an ungrouped layer by one datum and one output at a time, with F.unfold."""
    module = model.get_submodule(name)
    vectors, gradients = [], []
    for x, y in zip(*batch, strict=True):
        seen: list[tuple[Tensor, Tensor]] = []

        def see(_: nn.Module, args: tuple[Tensor, ...], output: Tensor, seen=seen) -> Tensor:
            seen.append((args[0], output))
            return output.clone()  # so that an in-place function does not overwrite it

        handle = module.register_forward_hook(see)
        output = model(x.unsqueeze(0))
        handle.remove()
        H = gn.exact.output_hessian(criterion, output.detach(), y.unsqueeze(0))[0]
        values, U = torch.linalg.eigh(H / len(batch[0]))  # of a mean over data
        for a, h in seen:
            if isinstance(module, nn.Conv2d):
                a = nn.functional.unfold(
                    a, module.kernel_size, module.dilation, module.padding, module.stride
                ).mT
            a = a.reshape(-1, a.shape[-1])
            ones = torch.ones_like(a[:, :1])
            vectors.append(a if module.bias is None else torch.cat([a, ones], 1))
            for value, u in zip(values.clamp(min=0), U.T, strict=True):
                (g,) = torch.autograd.grad(output[0] @ u, h, retain_graph=True)
                rows = g.flatten(2).mT if g.ndim == 4 else g
                gradients.append(value.sqrt() * rows.reshape(-1, rows.shape[-1]))
    a, g = torch.cat(vectors).detach(), torch.cat(gradients)
    return a.T @ a / len(a), g.T @ g


@pytest.mark.parametrize(
    ("problem", "names"),
    [
        (residual, ["first", "second", "side", "last"]),
        (images, ["features.0", "head"]),
        (twice, ["first", "middle", "last"]),
        (again_first, ["first", "middle", "last"]),
    ],
    ids=["residual", "images", "twice", "again first"],
)
def test_kflr_is_a_slow_restatement(problem, names: list[str]) -> None:
    model, batch = problem(3)
    criterion = nn.CrossEntropyLoss()
    found = gn.curvature(model, criterion, batch)
    for name in names:
        Q, G = slow_factors(model, name, criterion, batch)
        assert relative(found[name].Q, Q) < 1e-10, name
        assert relative(found[name].G, G) < 1e-10, name


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")])
def test_blocks_of_one_datum_are_exact_in_any_graph(criterion: nn.Module) -> None:
    model, batch = residual(1)
    found = gn.curvature(model, criterion, batch)
    expected = gn.exact.gauss_newton_blocks(model, criterion, batch)
    for name in ("first", "second", "side", "last"):
        assert relative(found[name].dense(), expected[name]) < 1e-10, name


def test_a_layer_without_a_part_has_no_curvature() -> None:
    model, batch = residual(5)
    found = gn.curvature(model, nn.CrossEntropyLoss(), batch)
    assert found["unused"].trace() == 0
    assert found["unused"].dense().shape == (35, 35)


def test_preactivation_curvature_in_a_graph_is_exact() -> None:
    model, batch = residual(6)
    criterion = nn.CrossEntropyLoss()
    found = gn.curvature(model, criterion, batch)
    for name, G in gn.exact.preactivation_gauss_newton(model, criterion, batch).items():
        if name != "unused":
            assert relative(found[name].G, G) < 1e-10


class Linear(nn.Module):
    """A deep linear network on sequences, averaged over them at the end or not."""

    def __init__(self, averaged: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2, bias=False)
        self.averaged = averaged

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return x.mean(1) if self.averaged else x


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_expand_and_reduce_are_exact_where_they_should_be(sharing) -> None:
    torch.manual_seed(0)
    model = Linear(averaged=sharing == "reduce").double()
    x = torch.randn(4, 5, 3).double()
    batch = x, torch.randn_like(model(x))
    criterion = nn.MSELoss()
    exact = gn.exact.gauss_newton_blocks(model, criterion, batch)
    for kind, agrees in ((sharing, True), ({"expand", "reduce"} - {sharing}, False)):
        kind = kind if agrees else next(iter(kind))
        found = gn.curvature(model, criterion, batch, method=gn.KFLR(sharing=kind))
        for name, block in exact.items():
            assert (relative(found[name].dense(), block) < 1e-10) == agrees, (kind, name)


class Branches(nn.Module):
    """One layer whose positions are averaged, and one whose positions are outputs each."""

    def __init__(self) -> None:
        super().__init__()
        self.averaged, self.single = nn.Linear(3, 2), nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.averaged(x).mean(1), self.single(x).flatten(1)], 1)


@pytest.mark.parametrize("estimator", [gn.KFLR, gn.KFRA])
def test_sharing_is_chosen_layer_by_layer(estimator) -> None:
    """Each layer is exact in its own setting, and wrong in the other's."""
    torch.manual_seed(0)
    model, x = Branches().double(), torch.randn(4, 5, 3).double()
    batch, criterion = (x, torch.randn(4, 12).double()), nn.MSELoss()
    exact = gn.exact.gauss_newton_blocks(model, criterion, batch)
    expected = {
        "expand": {"averaged": False, "single": True},
        "reduce": {"averaged": True, "single": False},
    }
    for sharing, agrees in (
        *expected.items(),
        ({"averaged": "reduce"}, dict.fromkeys(exact, True)),
    ):
        found = gn.curvature(model, criterion, batch, method=estimator(sharing=sharing))
        for name, block in exact.items():
            assert (relative(found[name].dense(), block) < 1e-10) == agrees[name], (sharing, name)
    with pytest.raises(ValueError, match=r"sharing is given for 'head'.*'averaged', 'single'"):
        gn.curvature(model, criterion, batch, method=estimator(sharing={"head": "reduce"}))
    with pytest.raises((ValueError, TypeCheckError)):
        estimator(sharing={"averaged": "reduced"})


def test_kfac_tends_to_kflr() -> None:
    model, batch = images(3)
    criterion = nn.CrossEntropyLoss()
    exact = gn.curvature(model, criterion, batch)
    drawn = gn.curvature(model, criterion, batch, method=gn.KFAC(samples=4000))
    for name in ("features.0", "head"):
        assert relative(drawn[name].G, exact[name].G) < 0.1
    for mine, theirs in zip(drawn["features.3"].parts, exact["features.3"].parts, strict=True):
        assert relative(mine.Q, theirs.Q) < 1e-12
        assert relative(mine.G, theirs.G) < 0.1


def test_groups_are_convolutions_of_their_own() -> None:
    """Two groups are two networks whose outputs are side by side."""
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 2, groups=2).double()
    halves = [nn.Conv2d(2, 3, 2).double() for _ in range(2)]
    for i, half in enumerate(halves):
        half.load_state_dict({k: p.chunk(2)[i] for k, p in layer.state_dict().items()})
    x, y = torch.randn(3, 4, 3, 3).double(), torch.randn(3, 6, 2, 2).double()
    criterion = nn.MSELoss(reduction="sum")
    found = gn.curvature(layer, criterion, (x, y))[""]
    for i, half in enumerate(halves):
        expected = gn.curvature(half, criterion, (x.chunk(2, 1)[i], y.chunk(2, 1)[i]))[""]
        assert relative(found.parts[i].Q, expected.Q) < 1e-12
        assert relative(found.parts[i].G, expected.G) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_other_precisions(dtype: torch.dtype) -> None:
    model, (x, y) = images(3)
    exact = gn.curvature(model, nn.CrossEntropyLoss(), (x, y))["features.0"]
    low = gn.curvature(model.to(dtype), nn.CrossEntropyLoss(), (x.to(dtype), y))["features.0"]
    assert low.Q.dtype == low.G.dtype == torch.float32
    assert relative(low.G.double(), exact.G) < (1e-5 if dtype == torch.float32 else 0.1)


def test_little_workspace_gives_the_same() -> None:
    model, batch = images(4)
    whole, parts = (
        gn.curvature(model, nn.CrossEntropyLoss(), batch, method=gn.KFLR(workspace=size))
        for size in (2**26, 1)
    )
    assert relative(parts["features.0"].G, whole["features.0"].G) < 1e-12


def test_data_that_are_mixed_are_refused() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, affine=False)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), norm, nn.Flatten(), nn.Linear(12, 2)).double()
    batch = torch.randn(4, 1, 3, 3).double(), torch.randint(2, (4,))
    with pytest.raises(gn.errors.UnsupportedGraphError, match=r"'0'.*mixes the data"):
        gn.curvature(model, nn.CrossEntropyLoss(), batch)
    model.eval()
    assert len(gn.curvature(model, nn.CrossEntropyLoss(), batch)) == 2


def test_kfac_of_mixed_data_is_the_datums_own_block() -> None:
    """Beside the Jacobian of all outputs by all of a layer's outputs, written out."""
    torch.manual_seed(0)
    first, last = nn.Linear(2, 3).double(), nn.Linear(3, 2).double()
    norm = nn.BatchNorm1d(3, affine=False).double()
    model = nn.Sequential(first, norm, nn.Tanh(), last)
    x, y = torch.randn(4, 2).double(), torch.randint(2, (4,))
    criterion = nn.CrossEntropyLoss()
    h = first(x).detach()
    J = torch.autograd.functional.jacobian(lambda h: last(torch.tanh(norm(h))), h)
    H = gn.exact.output_hessian(criterion, model(x).detach(), y)
    expected = torch.einsum("majb,mac,mcjd->bd", J, H, J)
    found = gn.curvature(model, criterion, (x, y), method=gn.KFAC(samples=20_000))["0"]
    assert relative(found.G, expected) < 0.05


def test_the_hessian_says_why_it_cannot() -> None:
    model, batch = images(2)
    with pytest.raises(
        gn.errors.UnsupportedGraphError, match=r"BlockHessian.*'features.0'.*Use 'kflr'"
    ):
        gn.curvature(model, nn.CrossEntropyLoss(), batch, method="hessian")


def test_a_parameter_used_beside_its_layer_has_its_exact_diagonal() -> None:
    class Tied(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.last.bias

    torch.manual_seed(0)
    model, criterion = Tied().double(), nn.CrossEntropyLoss()
    batch = torch.randn(3, 4).double(), torch.randint(3, (3,))
    found = gn.curvature(model, criterion, batch)["last"]
    truth = gn.exact.gauss_newton_blocks(model, criterion, batch)["last"]
    assert found.kind == "diagonal"
    assert relative(found.dense().diagonal(), truth.diagonal()) < 1e-10
