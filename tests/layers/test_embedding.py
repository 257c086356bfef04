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


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 2])
def test_a_bag_is_an_embedding_and_a_sum(mode: str, padding: int | None) -> None:
    class Bag(nn.Module):
        def __init__(self, whole: bool) -> None:
            super().__init__()
            kind = {"mode": mode} if whole else {}
            make = nn.EmbeddingBag if whole else nn.Embedding
            self.table = make(7, 4, padding_idx=padding, **kind)
            self.last, self.whole = nn.Linear(4, 3), whole

        def forward(self, words: Tensor) -> Tensor:
            h = self.table(words)
            if not self.whole:
                used = (words != (-1 if padding is None else padding)).unsqueeze(2)
                h = (h * used).sum(1)
                h = h / used.sum(1).clamp(min=1) if mode == "mean" else h
            return self.last(torch.tanh(h))

    torch.manual_seed(0)
    whole, apart = Bag(True).double(), Bag(False).double()
    apart.load_state_dict(whole.state_dict())
    words, y = torch.randint(7, (6, 5)), torch.randint(3, (6,))
    assert torch.allclose(whole(words), apart(words))
    criterion = nn.CrossEntropyLoss()
    for method in ("kflr", "kfac"):
        found = gn.curvature(whole, criterion, (words, y), method=method)["table"]
        expected = gn.curvature(apart, criterion, (words, y), method=method)["table"]
        assert relative(found.f, expected.f) < 1e-12
        assert relative(found.M, expected.M) < 1e-12


def test_bags_of_other_kinds_have_their_exact_diagonal() -> None:
    class Bags(nn.Module):
        def __init__(self, mode: str) -> None:
            super().__init__()
            self.table, self.last = nn.EmbeddingBag(7, 4, mode=mode), nn.Linear(4, 3)

        def forward(self, words: Tensor, offsets: Tensor | None = None) -> Tensor:
            return self.last(self.table(words, offsets))

    torch.manual_seed(0)
    words, y = torch.randint(7, (12,)), torch.randint(3, (3,))
    inputs = {"sum": (words, torch.tensor([0, 2, 7])), "max": (words.reshape(3, 4),)}
    for mode, arguments in inputs.items():
        model, criterion = Bags(mode).double(), nn.CrossEntropyLoss()
        found = gn.curvature(model, criterion, (arguments, y))["table"]
        expected = gn.exact.gauss_newton_blocks(model, criterion, (arguments, y))["table"]
        assert found.kind == "diagonal"
        assert relative(found.dense().diagonal(), expected.diagonal()) < 1e-10
