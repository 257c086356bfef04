from __future__ import annotations

import pytest
import torch
from torch import nn

import gaussnewton as gn
from gaussnewton.estimators import Estimator
from tests.problems import network


def test_prints_a_table_and_says_all_is_well(capsys) -> None:
    net = network([4, 6, 3])
    batch = torch.randn(40, 4).double(), torch.randint(3, (40,))
    report = gn.verify(net, nn.CrossEntropyLoss(), batch, ("kflr", "kfra", "kfac", "hessian"))
    printed = capsys.readouterr().out
    assert report.ok
    assert str(report) in printed
    assert "32 data of the batch's 40" in printed
    assert "All as promised." in printed
    rows = {(row.layer, row.method): row for row in report.rows}
    assert len(rows) == 8
    assert rows["layers.0", "kflr"].G_error < 1e-10
    assert rows["layers.0", "kfra"].G_error > 1e-3
    assert rows["layers.0", "hessian"].block_error < 1e-10
    assert 0.1 < rows["layers.0", "kflr"].cosine <= 1


def test_float32_with_large_layers() -> None:
    net = network([64, 100, 8, 100, 40], dtype=torch.float32)
    batch = torch.rand(50, 64), torch.rand(50, 40)
    report = gn.verify(net, nn.BCEWithLogitsLoss(), batch, show=False)
    assert report.ok
    assert report.tolerance == 1e-4


def scaled(base: type[Estimator], Q: float, G: float) -> Estimator:
    """An estimator whose factors are off."""

    class Wrong(base):
        def estimate(self, chain):
            return {
                name: gn.KroneckerBlock(Q=b.Q * Q, G=b.G * G)
                for name, b in dict(super().estimate(chain)).items()
            }

    return Wrong()


@pytest.mark.parametrize("base", [gn.KFLR, gn.KFRA])
@pytest.mark.parametrize(("Q", "G"), [(1.001, 1), (1, 1.001)])
def test_a_wrong_estimator_is_caught(base: type[Estimator], Q: float, G: float) -> None:
    net = network([4, 6, 3])
    batch = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    assert gn.verify(net, nn.MSELoss(), batch, scaled(base, 1, 1), show=False).ok
    report = gn.verify(net, nn.MSELoss(), batch, scaled(base, Q, G), show=False)
    assert not report.ok
    assert "NOT as promised" in str(report)
    assert "WRONG" in str(report)


def test_kfra_is_left_out_where_it_does_not_know_a_layer() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.PReLU(), nn.Linear(6, 3)).double()
    batch = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    criterion = gn.Loss(lambda h, y: (h - y).pow(4).mean())
    report = gn.verify(net, criterion, batch, show=False)
    assert {row.method for row in report.rows} == {"kflr", "kfac"}
    with pytest.raises(gn.errors.UnsupportedGraphError, match="PReLU"):
        gn.verify(net, criterion, batch, "kfra", show=False)


def test_loaders_weights_for_each_datum_and_narrow_models() -> None:
    net, x, y = network([4, 3]), torch.randn(40, 4).double(), torch.rand(40, 3).double()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    assert gn.verify(net, nn.MSELoss(), loader, show=False).data == 10
    weighted = nn.BCEWithLogitsLoss(weight=torch.rand(40, 1).double())
    assert gn.verify(net, weighted, (x, y), show=False).data == 40
    with pytest.raises(ValueError, match="Verify a wider copy"):
        gn.verify(net.bfloat16(), nn.MSELoss(), (x.bfloat16(), y.bfloat16()), show=False)
    with pytest.raises(gn.errors.BatchError, match="no batch at all"):
        gn.verify(net, nn.MSELoss(), iter(()))


def test_frozen_layers_in_between() -> None:
    net = network([4, 6, 5, 3])
    net.layers[1].requires_grad_(False)
    batch = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    assert gn.verify(net, nn.MSELoss(), batch, show=False).ok


@pytest.mark.parametrize("targets", ["tensor", "tuple"])
def test_cuts_inputs_and_targets_alike(targets: str) -> None:
    net = network([4, 3])
    x, y = torch.randn(9, 4).double(), torch.randn(9, 3).double()
    if targets == "tuple":
        report = gn.verify(
            net, nn.GaussianNLLLoss(), (x, (y, torch.ones(9, 3).double())), data=4, show=False
        )
    else:
        report = gn.verify(net, nn.MSELoss(), (x, y), data=4, show=False)
    assert (report.data, report.given, report.ok) == (4, 9, True)
