"""The MATLAB file of the Olivetti faces."""

from __future__ import annotations

import io

import torch

from gaussnewton.errors import DataError
from gaussnewton.experiments.data.source import Decoded
from gaussnewton.experiments.extra import require

SIDE = 64


def decode_faces(data: bytes, name: str) -> Decoded:
    """The variable ``faces``: bytes, each column an image of 64 × 64, itself column by column.

    Returns:
        The images, ``[count, row, column]``; and their bytes in the file's order, image after
        image and column after column.
    """
    loadmat = require("scipy.io", "reading the Olivetti faces").loadmat
    try:
        matrix = loadmat(io.BytesIO(data), variable_names=["faces"]).get("faces")
    except Exception as error:  # on a damaged file scipy raises whatever it stumbles over
        raise DataError(
            f"{name} cannot be read as a MATLAB file, it may be cut off: {error!r}."
        ) from error
    if matrix is None:
        raise DataError(f"{name} has no variable 'faces', which the Olivetti faces are in.")
    found = f"{tuple(matrix.shape)} of {matrix.dtype}"
    if matrix.ndim != 2 or len(matrix) != SIDE**2 or matrix.dtype.kind not in "uif":
        raise DataError(f"'faces' in {name} is {found}, not {SIDE**2} pixels by images.")
    pixels = matrix.astype("uint8")
    if (pixels != matrix).any():
        raise DataError(f"'faces' in {name} is {found} with values that are not bytes.")
    content = pixels.tobytes(order="F")
    columns_first = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, SIDE, SIDE)
    return Decoded(columns_first.mT.contiguous(), content)
