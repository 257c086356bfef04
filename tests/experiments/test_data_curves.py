"""CURVES: through the three points, smooth to look at, the same for the same seed."""

from __future__ import annotations

import pytest
import torch

from gaussnewton.experiments.data import curves
from gaussnewton.experiments.data.drawing import SIDE, draw, random_points, trace


def test_the_ink_goes_through_the_three_points() -> None:
    images = curves(count=500, seed=3).view(500, SIDE, SIDE)
    points = random_points(500, seed=3)
    column, row = points.long().unbind(2)
    ink = images[torch.arange(500)[:, None], row, column]
    assert ink.shape == (500, 3)
    assert ink.min() > 0.55  # the middle of a pixel is at most 0.71 from a point in it
    # Not because everything is inked:
    assert images.mean() < 0.1


def test_the_curve_is_the_parabola_through_the_points() -> None:
    points = random_points(50, seed=0)
    places = trace(points)
    torch.testing.assert_close(places[:, [0, 12, 24]], points)
    # A parabola is a curve of constant second difference, on each half with its own even steps.
    for half in (places[:, :13], places[:, 12:]):
        second = half.diff(n=2, dim=1)
        torch.testing.assert_close(second, second[:, :1].expand_as(second), atol=1e-4, rtol=0)


def test_drawn_as_the_distance_to_many_points_on_the_curve() -> None:
    points = random_points(20, seed=1)
    dense = trace(points, segments=2000)
    middle = torch.arange(SIDE) + 0.5
    y, x = torch.meshgrid(middle, middle, indexing="ij")
    pixels = torch.stack([x, y], -1).view(-1, 2)
    distance = torch.cdist(pixels, dense).amin(2).view(20, SIDE, SIDE)
    expected = (1.3 - distance).clamp(0, 1)
    torch.testing.assert_close(draw(trace(points)), expected, atol=0.05, rtol=0)


def test_strokes_stay_in_the_image_and_have_soft_edges() -> None:
    places = trace(random_points(20_000, seed=5))
    assert places.min() > 0.5
    assert places.max() < SIDE - 0.5
    images = curves(count=300, seed=5)
    assert images.min() == 0
    assert images.max() <= 1
    inked = images > 0
    assert ((images < 1) & inked).sum() > 0.3 * inked.sum()


def test_seeds() -> None:
    images = curves(count=100, seed=7)
    assert torch.equal(images, curves(count=100, seed=7))
    assert torch.equal(images[:37], curves(count=37, seed=7))  # parts of another size, too
    assert not torch.equal(images, curves(count=100, seed=8))
    assert len(torch.unique(images, dim=0)) == 100


def test_global_random_state_is_neither_used_nor_changed() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    images = curves(count=5)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(images, curves(count=5))


@pytest.mark.parametrize("same", [(0, 1), (1, 2), (0, 2), (0, 1, 2)])
def test_points_that_coincide(same: tuple[int, ...]) -> None:
    points = random_points(10, seed=0)
    points[:, list(same)] = points[:, same[0], None]
    images = draw(trace(points))
    assert images.isfinite().all()
    assert (images.amax((1, 2)) > 0.55).all()
    assert images.mean() < 0.1
