"""Tables of what each parameter gets, and strictness about it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.foreseen import foreseen_blocks
from tests.models import cases
from tests.test_uses import Bare, batch_of

CASES = cases()


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("experts", "returns its loss")])
def test_what_is_foreseen_is_what_is_found(name: str) -> None:
    torch.manual_seed(1)
    case, model = CASES[name], CASES[name].model().double().eval()
    found = gn.curvature(
        model, case.criterion, (case.inputs, case.targets[0]), outputs=case.outputs
    )
    foreseen = foreseen_blocks(model, found.theta)
    for group, block in found.items():
        expected = foreseen[group].block
        assert expected.kind == block.kind, group
        sizes = [{k: t.shape for k, t in b.numbers().items()} for b in (expected, block)]
        assert sizes[0] == sizes[1], group


def test_every_parameter_has_a_line() -> None:
    model = Bare().double()
    text = gn.explain(model)
    assert all(name in text for name, _ in model.named_parameters())
    (line,) = [line for line in text.splitlines() if line.startswith("mixed")]
    assert "Bare has no rule" in line


def test_with_a_batch_it_says_what_is_found() -> None:
    torch.manual_seed(0)
    model = Bare().double()
    lines = gn.explain(model, nn.CrossEntropyLoss(), batch_of(5, 3, 4)).splitlines()
    kinds = {line.split()[0]: line for line in lines}
    assert "diagonal" in kinds["mixed"]
    assert "dense" in kinds["offset"]


def test_strict_refuses_a_parameter_without_a_block_of_its_kind() -> None:
    torch.manual_seed(0)
    model, batch = Bare().double(), batch_of(5, 3, 4)
    with pytest.raises(gn.errors.UnsupportedGraphError, match=r"'mixed'.*'normed'.*F\.linear"):
        gn.curvature(model, nn.CrossEntropyLoss(), batch, strict=True)
    with pytest.raises(gn.errors.UnsupportedGraphError, match=r"'mixed'"):
        gn.explain(model, nn.CrossEntropyLoss(), batch, strict=True)
    with pytest.raises(ValueError, match="needs a batch"):
        gn.explain(model, strict=True)
    criterion = nn.CrossEntropyLoss()
    optimizer = gn.GaussNewton(model, criterion, strict=True)
    criterion(model(batch[0]), batch[1]).backward()
    with pytest.raises(gn.errors.UnsupportedGraphError, match="'mixed'"):
        optimizer.step()


def test_strict_is_content_with_layers() -> None:
    torch.manual_seed(0)
    case, model = CASES["LeNet"], CASES["LeNet"].model().double()
    batch = (case.inputs, case.targets[0])
    gn.curvature(model, case.criterion, batch, strict=True)
    assert "no rule" not in gn.explain(model, case.criterion, batch, strict=True)


def test_the_optimiser_tells_what_it_found() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + 0.1 * self.layer.weight.sum()

    torch.manual_seed(0)
    model, criterion = Beside().double(), nn.CrossEntropyLoss()
    optimizer = gn.GaussNewton(model, criterion)
    before = optimizer.explain()
    x, y = batch_of(5, 4)
    criterion(model(x), y).backward()
    optimizer.step()
    after = optimizer.explain()
    assert "Kronecker" in before
    assert "chosen at the first step" in before
    assert "diagonal" in after
    assert "used in other ways than by calls of its layer" in after
