"""The block of an embedding beside a slow re-statement, and exactly where it should be exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from tests.problems import fit, relative


class Words(nn.Module):
    """Words, their mean, a linear layer."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=padding)
        self.last = nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(torch.tanh(self.table(words)).mean(1))


def problem(n: int, length: int, padding: int | None = None):
    torch.manual_seed(0)
    model = Words(padding).double()
    return model, (torch.randint(7, (n, length)), torch.randint(3, (n,)))


def test_one_word_of_one_datum_is_exact() -> None:
    model, batch = problem(1, 1)
    criterion = nn.CrossEntropyLoss()
    found = gn.curvature(model, criterion, batch)["table"]
    expected = gn.exact.gauss_newton_blocks(model, criterion, batch)["table"]
    assert isinstance(found, gn.ScaledBlock)
    assert relative(found.dense(), expected) < 1e-10


@pytest.mark.parametrize("padding", [None, 2])
def test_a_table_is_a_linear_layer_of_unit_vectors(padding: int | None) -> None:
    """An embedding is [W] times unit vectors: the same factors, the other way round."""
    model, (words, y) = problem(6, 5, padding)
    criterion = nn.CrossEntropyLoss()

    class Units(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Linear(7, 4, bias=False).double()
            self.last = model.last

        def forward(self, units: Tensor) -> Tensor:
            return self.last(torch.tanh(self.table(units)).mean(1))

    twin = Units()
    twin.table.weight = nn.Parameter(model.table.weight.detach().T.clone())
    units = nn.functional.one_hot(words, 7).double()
    expected = gn.curvature(twin, criterion, (units, y))["table"]
    found = gn.curvature(model, criterion, (words, y))["table"]
    if padding is None:
        assert relative(found.f.diag(), expected.Q) < 1e-12
        assert relative(found.M, expected.G) < 1e-12
    else:
        assert found.f[padding] == 0
        assert torch.equal(found.f[:padding], expected.Q.diagonal()[:padding])
        assert found.M.trace() < expected.G.trace()


def test_trains_with_rare_words() -> None:
    model, (words, _) = problem(80, 4)
    y = (words == 3).any(1).long()
    criterion = nn.CrossEntropyLoss()
    optimizer = gn.GaussNewton(model, criterion)
    losses = fit(optimizer, words, y, 25)
    assert losses[-1] < 0.3 * losses[0]
    assert "one factor diagonal" in optimizer.explain()
