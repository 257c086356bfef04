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


def test_a_wrong_estimator_is_caught() -> None:
    class KFLRWrong(Estimator):
        def __init__(self, factor: str) -> None:
            self.factor = factor

        def __repr__(self) -> str:
            return "KFLR, wrong"

        def __call__(self, record):
            blocks = gn.KFLR()(record)
            return {
                name: gn.KroneckerBlock(
                    Q=b.Q * (1.001 if self.factor == "Q" else 1),
                    G=b.G * (1.001 if self.factor == "G" else 1),
                )
                for name, b in blocks.items()
            }

    net = network([4, 6, 3])
    batch = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    for factor in ("Q", "G"):
        report = gn.verify(net, nn.MSELoss(), batch, [KFLRWrong(factor)], show=False)
        assert not report.ok
        assert "NOT as promised" in str(report)
        assert "WRONG" in str(report)


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
