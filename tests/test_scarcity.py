"""Whether a batch has data enough, layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.observer import Observer
from gaussnewton.scarcity import TOLERATED, batches_wanted


def found(
    model: nn.Module,
    loop: Callable[[nn.Module, nn.Module], Tensor],
    largest: int | None = None,
) -> float:
    """The most inputs to a datum."""
    model, criterion = model.double(), nn.MSELoss()
    observer = Observer(model, criterion)
    loop(model, criterion).backward()
    return TOLERATED * batches_wanted(observer.take(), largest)


def once(*shape: int) -> Callable[[nn.Module, nn.Module], Tensor]:
    """The loss of a pass over data of a shape."""

    def loop(model: nn.Module, criterion: nn.Module) -> Tensor:
        out = model(torch.randn(*shape).double())
        return criterion(out, torch.zeros_like(out))

    return loop


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Bare(nn.Module):
    """x @ W, whose rows are the inputs, behind a table of positions and a wide normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, 5, 30))
        self.norm = nn.LayerNorm((5, 30))
        self.weight = nn.Parameter(torch.randn(30, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.table) @ self.weight


class Heads(nn.Module):
    """A wide layer that some passes leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.wide = nn.Linear(4, 40), nn.Linear(40, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.body(x))
        return hidden


CASES = {
    "chain": (nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3)), (4, 6), 21 / 4),
    "no bias": (nn.Linear(6, 3, bias=False), (4, 6), 6 / 4),
    "one datum": (nn.Linear(6, 3), (1, 6), 7.0),
    "sequence": (nn.Linear(6, 3), (4, 5, 6), 7 / 4),
    "convolution": (nn.Conv2d(3, 2, 3, stride=2), (4, 3, 9, 7), 28 / 4),
    "groups": (nn.Conv1d(4, 6, 3, groups=2, bias=False), (5, 4, 8), 6 / 5),
    "transposed": (nn.ConvTranspose2d(7, 2, 3, bias=False), (2, 7, 4, 4), 7 / 2),
    "two calls": (Twice(), (4, 8), 9 / 4),
    "product": (Bare(), (4, 5, 30), 30 / 4),
}


@pytest.mark.parametrize("case", CASES)
def test_the_scarcest_layer_counts(case: str) -> None:
    model, shape, expected = CASES[case]
    assert found(model, once(*shape)) == pytest.approx(expected)


def test_a_tile_has_as_many_vectors_as_the_whole() -> None:
    assert found(nn.Linear(20, 2), once(5, 20), largest=7) == pytest.approx(7 / 5)


def test_several_passes_count_each() -> None:
    def loop(model: nn.Module, criterion: nn.Module) -> Tensor:
        return once(2, 6)(model, criterion) + once(3, 6)(model, criterion)

    assert found(nn.Linear(6, 3), loop) == pytest.approx(7 / 5)


@pytest.mark.parametrize("tanh", [True, False])
def test_two_losses_of_one_pass_count_once(tanh: bool) -> None:
    """Of a chain, and of a network that is run once more for each."""
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh()) if tanh else nn.Linear(6, 3)
    shape = (4, 6) if tanh else (4, 5, 6)

    def loop(model: nn.Module, criterion: nn.Module) -> Tensor:
        out = model(torch.randn(*shape).double())
        result: Tensor = criterion(out, torch.zeros_like(out)) + criterion(
            out, torch.ones_like(out)
        )
        return result

    assert found(model, loop) == pytest.approx(7 / 4)


def test_a_layer_without_a_part_has_no_say() -> None:
    assert found(Heads(), once(4, 4)) == pytest.approx(5 / 4)


class Words(nn.Module):
    """Logits as [n t, V], or as [n, V, t]."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.table, self.head, self.flat = nn.Embedding(5, 40), nn.Linear(40, 5), flat

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.table(words)))
        return logits.flatten(0, 1) if self.flat else logits.transpose(1, 2)


def test_the_first_damping_does_not_depend_on_how_outputs_are_laid_out() -> None:
    """Fewer data than inputs, but more words than that."""
    first = []
    for flat in (True, False):
        torch.manual_seed(0)
        model, criterion = Words(flat).double(), nn.CrossEntropyLoss()
        words, targets = torch.randint(5, (4, 20)), torch.randint(5, (4, 20))
        optimizer = gn.GaussNewton(model, criterion, curvature="kflr")
        criterion(model(words), targets.flatten() if flat else targets).backward()
        optimizer.step()
        first.append(optimizer.param_groups[0]["progress"]["first_tau"])
    assert first[0] == pytest.approx(first[1], rel=1e-6)
