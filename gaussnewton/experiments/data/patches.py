"""Turned and magnified patches of an image."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

SAMPLES = 3


def patches(
    image: Float[Tensor, "height width"],
    angles: Float[Tensor, " count"],
    scales: Float[Tensor, " count"],
    side: int,
    samples: int = SAMPLES,
) -> Float[Tensor, "count side side"]:
    """The image turned, magnified, cropped to its own frame and subsampled, once for each pair.

    A patch shows the middle square of the image, smaller by the scale and turned. Each of its
    pixels is the mean over ``samples`` × ``samples`` points in it, interpolated bilinearly
    between the pixels of the image, so that fine detail does not alias. A point outside the image
    has the value of the nearest pixel.

    Args:
        image: the image; a square one keeps its proportions.
        angles: counter-clockwise, in degrees.
        scales: magnification.
        side: pixels along each side of a patch.
        samples: points along each side of a pixel.

    Example:
        >>> import torch
        >>> from gaussnewton.experiments.data.patches import patches
        >>> image = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> patches(image, torch.tensor([90.0]), torch.ones(1), side=2, samples=1)
        tensor([[[2., 4.],
                 [1., 3.]]])
    """
    count, fine = len(angles), side * samples
    cos, sin = (angles * (math.pi / 180)).cos() / scales, (angles * (math.pi / 180)).sin() / scales
    zero = torch.zeros_like(cos)
    # Rows (x, y) of the map from a place in the patch to its place in the image; y points down.
    theta = torch.stack([cos, -sin, zero, sin, cos, zero], 1).view(count, 2, 3)
    grid = functional.affine_grid(theta, [count, 1, fine, fine], align_corners=False)
    # All grids below each other, so that the image is not copied for each.
    points = functional.grid_sample(
        image[None, None],
        grid.view(1, count * fine, fine, 2),
        padding_mode="border",
        align_corners=False,
    )
    return functional.avg_pool2d(points.view(count, 1, fine, fine), samples).squeeze(1)
