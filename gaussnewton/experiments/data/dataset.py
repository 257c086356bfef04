"""The data sets by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float, Int64
from torch import Tensor

from gaussnewton.errors import DataError
from gaussnewton.experiments.data.digits import mnist
from gaussnewton.experiments.data.drawing import curves
from gaussnewton.experiments.data.portraits import faces

NAMES = ("curves", "mnist", "faces")


@dataclass(frozen=True, eq=False)  # tensors have no single truth of being equal
class DataSet:
    """Images, one a row, in [0, 1], and their labels where there are any."""

    name: str
    images: Float[Tensor, "count pixels"]
    labels: Int64[Tensor, " count"] | None = None


def load(name: str, folder: str | Path | None = None) -> DataSet:
    """A data set of the paper by its name: curves, mnist or faces.

    Args:
        name: which one.
        folder: where its files are; see :func:`mnist` and :func:`faces`. Curves are generated
            and need none.

    Raises:
        DataError: if there is none of that name, or its files cannot be had.

    Example:
        >>> from gaussnewton.experiments.data import load
        >>> load("letters")
        Traceback (most recent call last):
            ...
        gaussnewton.errors.DataError: there is no data set 'letters'; ... curves, mnist, faces.
    """
    if name == "curves":
        return DataSet(name, curves())
    if name == "mnist":
        return DataSet(name, *mnist(folder))
    if name == "faces":
        return DataSet(name, faces(folder))
    raise DataError(f"there is no data set {name!r}; there are {', '.join(NAMES)}.")
