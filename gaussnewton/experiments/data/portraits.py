"""FACES: turned and magnified patches of the Olivetti faces."""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from gaussnewton.experiments.data.matlab import decode_faces
from gaussnewton.experiments.data.patches import patches
from gaussnewton.experiments.data.source import Mirror, Source
from gaussnewton.experiments.data.storage import read

PHOTOGRAPHS = 250  # ten of each of the first 25 people
PAIRS = 414
ANGLES = (-90.0, 90.0)
SCALES = (1.4, 1.8)
SIDE = 25

OLIVETTI = Source(
    "olivettifaces.mat",
    "b119468c2f13775df12d3950e7c96644811647a6e10d30617777f245bf9b2f8b",
    decode_faces,
    (
        Mirror(
            "https://ndownloader.figshare.com/files/5976027",
            "b612fb967f2dc77c9c62d3e1266e0c73d5fca46a4b8906c18e454d41af987794",
        ),
        Mirror("https://cs.nyu.edu/~roweis/data/olivettifaces.mat"),
    ),
)


def faces(
    folder: str | Path | None = None,
    *,
    seed: int = 0,
    pairs: int = PAIRS,
    source: Source = OLIVETTI,
    cache: Path | None = None,
) -> Float[Tensor, "count pixels"]:
    """103,500 patches of faces, 25 × 25, one a row, in [0, 1], without labels.

    The paper, after Hinton and Salakhutdinov (2006), takes the 250 photographs of the first 25
    people, 64 × 64, and for each of them 414 random pairs of a rotation from −90° to 90° and a
    magnification from 1.4 to 1.8. It does not say how they are cropped. Here a magnified and turned
    photograph is cropped to its old frame, which is then subsampled: a patch shows a square of
    64/1.4 to 64/1.8 pixels around the middle. As 1.4 is about √2, such a square lies in the
    photograph however it is turned, so patches have no empty corners (those at 45° and the lowest
    magnifications reach over it by less than half a pixel, and repeat its border there).

    Grey levels, which go up to 242, are divided by 255. Hinton and Salakhutdinov standardised
    theirs; the paper does not mention that.

    Args:
        folder: holds ``olivettifaces.mat``. Without it, the folder of the environment variable
            ``GAUSSNEWTON_DATA``; without that, it is downloaded once and cached.
        seed: the same seed gives the same patches.
        pairs: of rotation and magnification, for each photograph.
        source: the file of photographs.
        cache: where downloads are kept; by default in the user's cache folder.

    Returns:
        The patches of the first photograph, then those of the second, and so on.

    Raises:
        DataError: if the file is missing, damaged, another one, or cannot be downloaded.

    Example:
        >>> from gaussnewton.experiments.data import faces
        >>> faces().shape  # doctest: +SKIP
        torch.Size([103500, 625])
    """
    photographs = read([source], folder, cache)[0][:PHOTOGRAPHS].float().div_(255)
    generator = torch.Generator().manual_seed(seed)
    angles, scales = torch.rand(2, len(photographs), pairs, generator=generator)
    angles.mul_(ANGLES[1] - ANGLES[0]).add_(ANGLES[0])
    scales.mul_(SCALES[1] - SCALES[0]).add_(SCALES[0])
    result = torch.empty(len(photographs), pairs, SIDE**2)
    # One photograph at a time: the points of all patches would need gigabytes.
    for row, photograph, angle, scale in zip(result, photographs, angles, scales, strict=True):
        row.copy_(patches(photograph, angle, scale, SIDE).flatten(1))
    # Rounding in the interpolation could pass 1 by a hair.
    return result.flatten(0, 1).clamp_(0, 1)
