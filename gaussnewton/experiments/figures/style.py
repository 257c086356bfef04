"""One look for all figures: colours, lines, axes.

The colours are those of Okabe and Ito, which readers of any colour vision can tell apart; what
matters is told by the kind of line too. Figures are made without pyplot, so that drawing one
changes nothing for the rest of a program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gaussnewton.experiments.extra import require

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

INK = "#1f2328"
"""Text and axes. The report replaces it by the colour of the page's own text."""

MUTED = "#80868b"
"""Grids, bounds and captions: readable on light and on dark."""

COLOURS = {
    "kfra": "#0072B2",
    "kfac": "#D55E00",
    "kflr": "#009E73",
    "adam": "#CC79A7",
    "momentum": "#E69F00",
    "nesterov": "#56B4E9",
    "sgd": "#A6761D",
    "gaussnewton": INK,
    "reference": MUTED,
}
"""A colour for each method."""

LINES: dict[str, Any] = {
    "solid": "-",
    "dashed": (0, (5, 2)),
    "dotted": (0, (1.2, 1.6)),
    "dashdot": (0, (5, 1.6, 1.2, 1.6)),
}


def line(style: str) -> dict[str, Any]:
    """How to draw a style, given as ``"<method>"`` or ``"<method> <kind of line>"``.

    Example:
        >>> from gaussnewton.experiments.figures.style import line
        >>> line("kfra dashed")["color"], line("kfra")["linestyle"]
        ('#0072B2', '-')
        >>> line("kfra wavy")
        Traceback (most recent call last):
            ...
        ValueError: there is no style 'kfra wavy'; ...
    """
    method, _, kind = style.partition(" ")
    kind = kind or "solid"
    if method not in COLOURS or kind not in LINES:
        raise ValueError(
            f"there is no style {style!r}; it is a method ({', '.join(COLOURS)}) and, if not "
            f"solid, a kind of line ({', '.join(LINES)})"
        )
    return {"color": COLOURS[method], "linestyle": LINES[kind], "linewidth": 1.6}


def canvas(width: float, height: float) -> matplotlib.figure.Figure:
    """An empty figure, in inches, that makes room for all its labels."""
    figure = require("matplotlib.figure", "drawing figures").Figure(
        figsize=(width, height), layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
    return figure


def dress(axes: matplotlib.axes.Axes, title: str, x: str = "", y: str = "") -> None:
    """Title, labels, a light grid and open sides."""
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)
    axes.tick_params(labelsize=8, color=INK, labelcolor=INK)
    axes.tick_params(which="minor", color=INK, labelsize=8, labelcolor=INK)
    axes.grid(True, color=MUTED, alpha=0.25, linewidth=0.6)
    axes.patch.set_alpha(0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)


def legend(figure: matplotlib.figure.Figure, handles: list[Any], columns: int) -> None:
    """One legend for all panels, above them, in at most so many columns as fit the width."""
    for count in range(columns, 0, -1):
        drawn = figure.legend(
            handles=handles,
            loc="outside upper center",
            ncols=count,
            fontsize=9,
            frameon=False,
            labelcolor=INK,
            handlelength=2.8,
        )
        if count == 1 or drawn.get_window_extent().width <= figure.bbox.width:
            return
        drawn.remove()


def note(figure: matplotlib.figure.Figure, text: str) -> None:
    """A small line below the panels: what the numbers rest on."""
    if text:
        figure.supxlabel(text, fontsize=8, color=MUTED)
