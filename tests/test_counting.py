"""Counted costs of blocks, beside what torch counts of the code at work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import gaussnewton as gn
from gaussnewton.blocks.bounded import bounded
from gaussnewton.counting import Count, count
from gaussnewton.foreseen import foreseen_blocks
from gaussnewton.jacobian import jacobian_product
from gaussnewton.observer import Observer
from gaussnewton.tiles import tiled_gram
from tests.blocks.test_blocks import psd

VOCABULARY, WIDTH, LENGTH, DATA = 13, 8, 5, 3


class Transformer(nn.Module):
    """One block of attention and a multilayer perceptron, without a bias at the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, 2)
        x = x + self.out((q @ k.mT / WIDTH**0.5).softmax(2) @ v)
        x = x + self.down(torch.relu(self.up(self.norms[1](x))))
        return self.head(x).flatten(0, 1)


def operations(run) -> int:
    def cholesky(shape, *_, **__) -> int:
        *batch, d, _ = shape
        return torch.Size(batch).numel() * (d**3 // 3)

    def solve(right, left, *_, **__) -> int:
        *batch, d, _ = left
        return torch.Size(batch).numel() * 2 * d**2 * right[-1]

    mapping = {
        torch.ops.aten.linalg_cholesky_ex: cholesky,
        torch.ops.aten.cholesky_solve: solve,
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("largest", [None, 9])
def test_moments_of_a_transformer(largest: int | None) -> None:
    """All products of an estimate but those of the passes themselves."""
    model, criterion = Transformer(), nn.CrossEntropyLoss()
    words, targets = torch.randint(VOCABULARY, (2, DATA, LENGTH))
    batch = words, targets.flatten()
    calls = [part for part in model.modules() if not list(part.children())]

    def passes() -> None:
        found: list[Tensor] = []
        hooks = [part.register_forward_hook(lambda *a: found.append(a[2])) for part in calls]
        outputs = model(words)
        torch.autograd.grad(outputs, found, torch.ones_like(outputs))
        for hook in hooks:
            hook.remove()

    def estimate() -> None:
        gn.curvature(model, criterion, batch, gn.KFAC(largest=largest))

    foreseen = foreseen_blocks(model, gn.Theta(model), largest=largest)
    expected = 0
    for name, part in foreseen.items():
        if name.startswith("norms"):  # one vector a datum, its positions being summed
            expected += count(part.block, DATA).moments
        else:
            expected += count(part.block, DATA * LENGTH).moments
        if name in ("qkv", "out", "up", "down") and (largest is None or part.block.columns <= 9):
            # The bias's column is a sum, which torch does not count.
            expected -= 2 * DATA * LENGTH * (2 * part.block.columns - 1)
    if largest == 9:
        assert any(isinstance(part.block, gn.TiledBlock) for part in foreseen.values())
    assert operations(estimate) - operations(passes) == expected


@pytest.mark.parametrize("directions", [1, 2])
def test_products_with_the_jacobian_of_a_transformer(directions: int) -> None:
    """The pass once more, and twice as much for each direction: W ẋ and Ẇ x."""
    model, criterion = Transformer(), nn.CrossEntropyLoss()
    words, targets = torch.randint(VOCABULARY, (2, DATA, LENGTH))
    observer = Observer(model, criterion)
    criterion(model(words), targets.flatten()).backward()
    (observation,) = observer.take()
    stacks = {g.name: torch.randn(directions, g.rows, g.columns) for g in gn.Theta(model)}
    with observer.paused():
        jacobian_product(observation.passage, stacks)  # the first is checked in another way too
        found = operations(lambda: jacobian_product(observation.passage, stacks))
        assert found == (1 + 2 * directions) * operations(lambda: model(words))


@pytest.mark.parametrize("largest", [None, 4])
@pytest.mark.parametrize("shape", [(5, 7), (4, 9)])
def test_inversion_and_solving(shape: tuple[int, int], largest: int | None) -> None:
    rows, columns = shape
    block = bounded(gn.KroneckerBlock(psd(columns), psd(rows)), largest)
    inverse, V = block.invert(0.1, "factored"), torch.randn(rows, columns).double()
    counted = count(block, 1)
    assert operations(lambda: block.invert(0.1, "factored")) == counted.inversion
    assert operations(lambda: inverse.solve(V)) == counted.solve


@pytest.mark.parametrize("rows", [10, 300])
@pytest.mark.parametrize("largest", [None, 410])
def test_symmetric_products_in_panels(rows: int, largest: int | None) -> None:
    block = bounded(gn.KroneckerBlock(torch.eye(900), torch.eye(1)), largest)
    x = torch.randn(rows, 900)
    found = operations(lambda: tiled_gram(x, largest))
    assert found == count(block, rows).moments - 2 * rows


def test_groups_add_up_and_numbers_are_not_needed() -> None:
    part = gn.KroneckerBlock(torch.eye(3, device="meta"), torch.eye(2, device="meta"))
    one = count(part, 7)
    assert count(gn.GroupedBlock((part, part)), 7) == one + one
    assert one == Count(moments=2 * 7 * 13, inversion=9 + 2, solve=2 * 2 * 9 + 2 * 3 * 4, bytes=52)
    table = gn.ScaledBlock(torch.ones(50, device="meta"), torch.eye(3, device="meta"))
    assert count(table, 7).solve == 4 * 50 * 9
    assert count(gn.DiagonalBlock(torch.ones(2, 3)), 7).bytes == 24
    assert count(gn.DenseBlock(torch.eye(6), 2, 3), 7).inversion == 72
