"""The paper's figures by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gaussnewton.experiments.figures import alignment, progress, rank, surface
from gaussnewton.experiments.figures.saving import save

if TYPE_CHECKING:
    import matplotlib.figure

Needs = Literal["nothing", "training", "runs"]


@dataclass(frozen=True)
class FigureKind:
    """How one figure is computed, drawn and described.

    Attributes:
        name: as in ``FIGURES``.
        title: a heading.
        where: its place in the paper.
        needs: what ``compute`` is given. "nothing": settings alone. "training": ``(model,
            criterion, batches)`` and settings. "runs": ``(problems, budget=…)``, records of runs.
        compute: returns the result, plain data that JSON can hold.
        draw: from the result to a matplotlib figure.
        caption: from the result to a sentence or two.
        keys: of the result, by which it is known.
    """

    name: str
    title: str
    where: str
    needs: Needs
    compute: Callable[..., dict[str, Any]]
    draw: Callable[[dict[str, Any]], matplotlib.figure.Figure]
    caption: Callable[[dict[str, Any]], str]
    keys: tuple[str, ...] = ()

    def save(
        self, result: dict[str, Any], folder: str | Path, name: str | None = None
    ) -> dict[str, Path]:
        """Draw a result, and write it as JSON, SVG and PNG under a name, by default its own."""
        return save(result, self.draw(result), folder, name or self.name)


def _progress(name: str, title: str, where: str, **settings: Any) -> FigureKind:
    return FigureKind(
        name, title, where, "runs", partial(progress.compute, name, **settings), progress.draw,
        progress.caption, ("problems", "by", "budget"),
    )  # fmt: skip


_ALL = (
    FigureKind(
        "surface", "The error surface of a ReLU network", "figure 1, section 2.2.3", "nothing",
        surface.compute, surface.draw, surface.caption, ("panels", "total", "directions"),
    ),
    _progress("curves", "CURVES", "figure 2 (a), section 5.1"),
    _progress("faces", "FACES", "figure 2 (b), section 5.1"),
    _progress("mnist", "MNIST", "figure 2 (c), section 5.1"),
    _progress("mixture", "A mixture of two binary classifiers", "figure 3, section 5.2"),
    FigureKind(
        "rank", "The rank of the curvature", "section 6, appendix D", "nothing",
        rank.compute, rank.draw, rank.caption, ("panels", "checked", "violations"),
    ),
    _progress("cpu", "Wall-clock on the CPU", "appendix F.1", by=("seconds",)),
    FigureKind(
        "alignment", "Alignment with the exact Gauss-Newton step", "appendix F.2", "training",
        alignment.compute, alignment.draw, alignment.caption, ("updates", "layers", "whole"),
    ),
)  # fmt: skip

FIGURES: dict[str, FigureKind] = {kind.name: kind for kind in _ALL}
"""Every figure by name, in the order of the paper."""
