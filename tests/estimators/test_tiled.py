"""Estimates with a limit on the width of factors: the tiles of those without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.blocks.bounded import bounded
from gaussnewton.foreseen import foreseen_blocks
from gaussnewton.tiles import tiled, untiled
from tests.models import cases
from tests.problems import network

CASES = {n: case for n, case in cases().items() if n not in ("experts", "returns its loss")}
LIMIT = 5


def assert_same(found: gn.Block, expected: gn.Block) -> None:
    assert found.kind == expected.kind
    theirs = expected.numbers()
    assert found.numbers().keys() == theirs.keys()
    for key, part in found.numbers().items():
        torch.testing.assert_close(part, theirs[key])


def deep(bias: bool) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return network((7, 6, 11, 5, 4), bias=bias), (torch.randn(9, 7).double(), torch.rand(9, 4))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("largest", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("loss", [nn.MSELoss, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss])
@pytest.mark.parametrize("method", [gn.KFLR, gn.KFAC])
def test_chains(method, loss: type[nn.Module], largest: int, bias: bool) -> None:
    model, (x, y) = deep(bias)
    batch = x, y.double().softmax(1)
    whole = gn.curvature(model, loss(), batch, method=method())
    found = gn.curvature(model, loss(), batch, method=method(largest=largest))
    for name, block in whole.items():
        assert_same(found[name], bounded(block, largest))
        assert largest < 12 or isinstance(found[name], gn.KroneckerBlock)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("largest", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("function", ["nn.Tanh", "identity", "softmax"])
def test_kfra_goes_on_from_tiles(largest: int, bias: bool, function: str) -> None:
    """The recursion with every matrix cut where it arises, all written out."""
    if function == "softmax":
        torch.manual_seed(0)
        parts = [nn.Linear(7, 6, bias), nn.Softmax(1), nn.Linear(6, 11, bias), nn.Softmax(1)]
        model: nn.Module = nn.Sequential(*parts, nn.Linear(11, 4, bias)).double()
    else:
        model = network((7, 6, 11, 4), function, bias=bias)
    linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
    x, y = torch.randn(9, 7).double(), torch.rand(9, 4).double()
    found = gn.curvature(model, nn.BCEWithLogitsLoss(), (x, y), method=gn.KFRA(largest=largest))
    of = {"nn.Tanh": torch.tanh, "identity": lambda h: h, "softmax": lambda h: h.softmax(-1)}
    inputs, a = [], x
    for i, layer in enumerate(linears):
        inputs.append(a)
        a = layer(a)
        a = of[function](a) if i < 2 else a

    p = a.sigmoid()
    M = cut((p * (1 - p)).mean(0).diag() / 4, largest)
    for i in (2, 1, 0):
        layer = linears[i]
        if i < 2:
            h = layer(inputs[i])
            J = torch.stack([torch.autograd.functional.jacobian(of[function], row) for row in h])
            M = cut((J.mT @ M @ J).mean(0), largest)
        block = found[next(n for n, part in model.named_modules() if part is layer)]
        Q = torch.cat([inputs[i], torch.ones(9, 1).double()], 1) if bias else inputs[i]
        expected = torch.kron(cut(Q.T @ Q / 9, largest), M)
        torch.testing.assert_close(block.dense(), expected.detach())
        M = cut(layer.weight.T @ M @ layer.weight, largest)


def cut(matrix: Tensor, largest: int) -> Tensor:
    return untiled(tiled(matrix, largest))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", CASES)
def test_networks(name: str, sharing: str) -> None:
    torch.manual_seed(1)
    case, model = CASES[name], CASES[name].model().double().eval()
    batch = (case.inputs, case.targets[0])

    def curvature(largest: int | None) -> gn.Curvature:
        method = gn.KFLR(sharing=sharing, largest=largest)  # type: ignore[arg-type]
        return gn.curvature(model, case.criterion, batch, method, outputs=case.outputs)

    whole, found = curvature(None), curvature(LIMIT)
    foreseen = foreseen_blocks(model, found.theta, largest=LIMIT)
    for group, block in whole.items():
        expected = foreseen[group].block
        assert expected.kind == found[group].kind
        assert {k: t.shape for k, t in expected.numbers().items()} == {
            k: t.shape for k, t in found[group].numbers().items()
        }
        if "tied" not in foreseen[group].fallback:  # nearest to a sum of tiles, not tiles of it
            assert_same(found[group], bounded(block, LIMIT))


def test_kfra_in_a_network_is_cut() -> None:
    case = CASES["LeNet"]
    model, batch = case.model().double().eval(), (case.inputs, case.targets[0])
    whole, found = (
        gn.curvature(model, case.criterion, batch, gn.KFRA(largest=limit)) for limit in (None, 7)
    )
    assert any(isinstance(block, gn.TiledBlock) for block in found.values())
    for name, block in whole.items():
        assert_same(found[name], bounded(block, 7))


@pytest.mark.parametrize("method", [gn.KFLR, gn.KFAC])
def test_corrected_eigenvalues_where_there_are_no_tiles(method) -> None:
    model, (x, y) = deep(bias=True)
    batch, criterion = (x, y.double()), nn.MSELoss()
    whole, found = (
        gn.curvature(model, criterion, batch, method(eigenvalues="corrected", largest=limit))
        for limit in (None, 7)
    )
    factored = gn.curvature(model, criterion, batch, method(largest=7))
    kinds = [type(block) for block in found.values()]
    assert set(kinds) == {gn.EigenBlock, gn.TiledBlock}
    for name, block in found.items():
        tiles = isinstance(block, gn.TiledBlock)
        expected = factored[name] if tiles else whole[name]
        torch.testing.assert_close(block.dense(), expected.dense())


def test_verify_holds_the_tiles_to_the_promise() -> None:
    model, (x, y) = deep(bias=True)
    report = gn.verify(model, nn.MSELoss(), (x, y.double()), gn.KFLR(largest=3), show=False)
    assert report.ok
    assert all(row.G_error is not None and row.G_error < 1e-10 for row in report.rows)


def test_a_limit_of_nothing_is_refused() -> None:
    for make in (gn.KFLR, gn.KFRA, gn.KFAC):
        with pytest.raises(ValueError, match="largest is at least 1"):
            make(largest=0)


def test_an_own_limit_stays_if_it_is_lower() -> None:
    for make in (gn.KFLR, gn.KFRA, gn.KFAC):
        assert make().with_largest(7).largest == 7
        assert make(largest=3).with_largest(7).largest == 3
        assert make(largest=9).with_largest(7).largest == 7
        own = make(largest=9)
        assert own.with_largest(None) is own
        assert own.largest == 9
