"""Models that return more than what the criterion looks at, under `verify` and `alignment`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.returning import returning


class Wordy(nn.Module):
    """Returns its logits in a dict, with something else beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x, "logits": self.body(x)}


def logits(returned: Any) -> Tensor:
    return returned["logits"]


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(9, 4).double(), torch.randint(3, (9,))


def test_verify_is_that_of_the_part_that_is_looked_at() -> None:
    model, criterion, data = Wordy().double(), nn.CrossEntropyLoss(), batch()
    found = gn.verify(model, criterion, data, ["kflr", "kfra"], outputs=logits, show=False)
    plain = gn.verify(model.body, criterion, data, ["kflr", "kfra"], show=False)
    assert found.ok
    assert [row.cosine for row in found.rows] == pytest.approx([row.cosine for row in plain.rows])
    assert set(model(data[0])) == {"hidden", "logits"}


def test_alignment_is_that_of_the_part_that_is_looked_at() -> None:
    model, criterion, data = Wordy().double(), nn.CrossEntropyLoss(), batch()
    found = gn.alignment(model, criterion, data, "kflr", damping=1e-2, outputs=logits)
    plain = gn.alignment(model.body, criterion, data, "kflr", damping=1e-2)
    assert found.whole == pytest.approx(plain.whole)
    assert found.layers["body.0"] == pytest.approx(plain.layers["0"])


def test_the_model_returns_everything_again_after_an_error() -> None:
    model = Wordy()
    with pytest.raises(KeyError), returning(model, lambda returned: returned["absent"]):
        model(torch.randn(2, 4))
    assert set(model(torch.randn(2, 4))) == {"hidden", "logits"}
