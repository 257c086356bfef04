"""CURVES: images of smooth curves through three random points."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

COUNT = 20_000
SIDE = 28
MARGIN = 3.0  # pixels between the points and the edge; the curves bulge by less
PEN = 0.8  # pixels from the middle of a stroke to where it has faded by half
SEGMENTS = 24
PART = 4  # images drawn at once, few enough for their distances to stay in the cache


def curves(count: int = COUNT, seed: int = 0) -> Float[Tensor, "count 784"]:
    """Generated images of pen strokes, 28 × 28, one a row, in [0, 1].

    Each is a smooth curve through three points drawn evenly from the image, three pixels or more
    off its edge, so that six numbers determine it, as in the data of Hinton and Salakhutdinov
    (2006). They are like theirs, not the same images.

    Args:
        count: how many images. The first of many are the same as fewer with that seed.
        seed: the same seed gives the same images; torch's own random state is not used.

    Example:
        >>> from gaussnewton.experiments.data import curves
        >>> images = curves(count=4)
        >>> images.shape, images.min().item(), images.max().item() > 0.9
        (torch.Size([4, 784]), 0.0, True)
    """
    points = random_points(count, seed)
    images = torch.empty(count, SIDE * SIDE)
    for image, part in zip(images.split(PART), points.split(PART), strict=True):
        image.copy_(draw(trace(part)).flatten(1))
    return images


def random_points(count: int, seed: int) -> Float[Tensor, "count 3 2"]:
    """Three places in the image (x to the right, y down, in pixels) for each curve."""
    generator = torch.Generator().manual_seed(seed)
    unit = torch.rand(count, 3, 2, generator=generator)
    return MARGIN + (SIDE - 2 * MARGIN) * unit


def trace(
    points: Float[Tensor, "count 3 2"], segments: int = SEGMENTS
) -> Float[Tensor, "count places 2"]:
    r"""Places along the parabola through three points p₀, p₁, p₂.

    .. math:: p(t) = \frac{(t - s)(t - 1)}{s} p_0 + \frac{t (1 - t)}{s (1 - s)} p_1
                     + \frac{t (t - s)}{1 - s} p_2, \qquad 0 \le t \le 1,

    which is at p₁ when t = s. With s = √|p₁−p₀| / (√|p₁−p₀| + √|p₂−p₁|), the centripetal choice,
    the curve does not swing far out where the points lie unevenly. Of the places, one is p₁.
    """
    first, middle, last = points.unbind(1)
    near, far = points.diff(dim=1).norm(dim=2, keepdim=True).sqrt().unbind(1)
    # Two points in one place would divide by zero.
    s = (near / (near + far).clamp(min=1e-6)).clamp(0.05, 0.95)[:, None]
    half = torch.linspace(0, 1, segments // 2 + 1)[None, :, None]
    t = torch.cat([s * half, s + (1 - s) * half[:, 1:]], 1)
    return (
        (t - s) * (t - 1) / s * first[:, None]
        + t * (1 - t) / (s * (1 - s)) * middle[:, None]
        + t * (t - s) / (1 - s) * last[:, None]
    )


def draw(places: Float[Tensor, "count places 2"]) -> Float[Tensor, "count 28 28"]:
    """Strokes along straight segments from place to place.

    A pixel's grey falls linearly with the distance of its middle from the nearest segment, over
    the width of one pixel, which is what covering it by the pen's edge amounts to.
    """
    start, step = places[:, :-1, :, None], places.diff(dim=1)[..., None]
    offset = torch.arange(SIDE) + 0.5 - start
    length = (step**2).sum(2, keepdim=True).clamp(min=1e-12)
    # With a = offset·step / |step|², the nearest point of a segment is at t = a, or at its end;
    # its squared distance is |offset|² − |step|² t (2a − t). In place, as all the time goes here.
    a, square = _outer_sum(offset * step / length), _outer_sum(offset**2)
    t = a.clamp(0, 1)
    square.addcmul_(a.mul_(2).sub_(t).mul_(t), length, value=-1)
    distance = square.amin(1).clamp_(min=0).sqrt_()
    return (PEN + 0.5 - distance).clamp_(0, 1)


def _outer_sum(xy: Float[Tensor, "count segments 2 side"]) -> Tensor:
    """Entry (row i, column j) is y_i + x_j, as sums over both coordinates are."""
    return xy[:, :, 1, :, None] + xy[:, :, 0, None, :]
