"""The paper's figures: each computes plain data, and draws them.

``FIGURES`` has them by name. Computing needs no matplotlib; drawing does, and says so where it
is not installed.
"""

from gaussnewton.experiments.figures import alignment, progress, rank, surface
from gaussnewton.experiments.figures.registry import FIGURES, FigureKind
from gaussnewton.experiments.figures.saving import load, save

__all__ = [
    "FIGURES",
    "FigureKind",
    "alignment",
    "load",
    "progress",
    "rank",
    "save",
    "surface",
]
