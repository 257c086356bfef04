"""Batches: every datum in turn, and resumed bit for bit."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor

from gaussnewton.errors import BatchError
from gaussnewton.experiments.data import Batches, batches


def rows(count: int) -> Tensor:
    return torch.arange(count).float()[:, None].repeat(1, 3)


def test_an_epoch_has_each_datum_once_with_its_own_target() -> None:
    data = batches(rows(12), torch.arange(12) + 100, size=4)
    orders = []
    for _ in range(3):
        seen = []
        for x, y in (next(data) for _ in range(3)):
            assert x.shape == (4, 3)
            assert torch.equal(x[:, 0].long() + 100, y)
            seen += y.tolist()
        assert sorted(seen) == list(range(100, 112))
        orders.append(seen)
    assert orders[0] != orders[1] != orders[2] != sorted(orders[2])


def test_batches_have_one_size_and_leave_others_out_each_epoch() -> None:
    data, left_out = batches(rows(10), size=4), set()
    for _ in range(40):
        x = torch.cat([next(data)[0], next(data)[0]])[:, 0]
        assert len(x.unique()) == 8
        left_out |= set(range(10)) - set(x.long().tolist())
    assert left_out == set(range(10))


def test_without_targets_a_batch_is_its_own() -> None:
    x, y = next(batches(rows(5), size=2))
    assert x is y


def test_seeds_and_global_random_state() -> None:
    def first(seed: int) -> list[float]:
        return next(batches(rows(50), size=50, seed=seed))[0][:, 0].tolist()

    before = torch.get_rng_state()
    assert first(0) == first(0) != first(1)
    assert torch.equal(before, torch.get_rng_state())
    # An epoch of one seed is not an epoch of the next.
    data = batches(rows(50), size=50)
    next(data)
    assert next(data)[0][:, 0].tolist() != first(1)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 7])
def test_resumed_bit_for_bit(after: int) -> None:
    data = batches(rows(10), torch.arange(10), size=3, seed=4)
    for _ in range(after):
        next(data)
    file = io.BytesIO()
    torch.save(data.state_dict(), file)
    rest = [next(data) for _ in range(9)]  # through the ends of two epochs
    file.seek(0)
    again = batches(rows(10), torch.arange(10), size=3, seed=5)
    next(again)
    again.load_state_dict(torch.load(file, weights_only=True))
    for (x, y), (other_x, other_y) in zip(rest, again, strict=False):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def test_a_saved_state_does_not_move_on() -> None:
    data = batches(rows(10), size=3)
    saved = data.state_dict()
    expected = [next(data)[0] for _ in range(5)]
    data.load_state_dict(saved)
    assert all(torch.equal(next(data)[0], x) for x in expected)


def test_data_that_do_not_fit() -> None:
    with pytest.raises(BatchError, match="10 inputs and 9 targets"):
        Batches(rows(10), torch.arange(9), size=2)
    for size in (0, 11):
        with pytest.raises(BatchError, match=f"batches of {size} cannot be taken from 10 data"):
            Batches(rows(10), size=size)
    with pytest.raises(BatchError, match="went over 10 data, this one has 12"):
        Batches(rows(12), size=2).load_state_dict(Batches(rows(10), size=2).state_dict())
