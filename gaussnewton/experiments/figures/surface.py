"""The error surface of a two-layer ReLU network (fig. error:surface)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gaussnewton.experiments.extra import require
from gaussnewton.experiments.figures.maxima import maxima_on_grid, maxima_on_lines
from gaussnewton.experiments.figures.style import COLOURS, INK, MUTED, canvas, note

if TYPE_CHECKING:
    import matplotlib.figure


class _Network:
    """h₁ = W₁ a₀, h₂ = W₂ relu(h₁) on random data, with a 1 at the end of a₀ for the bias."""

    def __init__(self, data: int, inputs: int, hidden: int, outputs: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.a = torch.cat([self.random(data, inputs), torch.ones(data, 1).double()], 1)
        self.y = self.random(data, outputs)
        self.shapes = (hidden, inputs + 1), (outputs, hidden)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64)

    def error(
        self, W1: Float[Tensor, "*p h i"], W2: Float[Tensor, "*p o h"]
    ) -> tuple[Float[Tensor, " *p"], Bool[Tensor, "*p units"]]:
        """E = ½ mean ‖h₂ − y‖², and which units are on, for stacks of weights."""
        h = W1 @ self.a.T
        difference = W2 @ h.relu() - self.y.T
        pattern = (h > 0).flatten(-2)
        return 0.5 * difference.square().sum(-2).mean(-1), pattern


def compute(
    *,
    data: int = 6,
    inputs: int = 3,
    hidden: int = 4,
    outputs: int = 2,
    points: int = 81,
    extent: float = 2.0,
    directions: int = 20_000,
    seed: int = 0,
) -> dict[str, Any]:
    """E along two random directions: in W₁, in W₂, and one in each; and a search for maxima.

    Args:
        data: N.
        inputs: of the network.
        hidden: ReLU units.
        outputs: of the network.
        points: along each side of a grid. An odd number has the origin on it.
        extent: of the grid in both directions.
        directions: in how many random places, along one random direction in one layer each, to
            look for maxima besides.
        seed: the same seed gives the same figure.

    Returns:
        ``panels``, each with ``title``, ``x``, ``y``, ``E`` (``E[i][j]`` at ``x[i]``, ``y[j]``)
        and ``check`` (see :func:`~gaussnewton.experiments.figures.maxima.maxima_on_grid`);
        ``directions``, the same counts for the random directions; ``total``, for all grids.

    Example:
        >>> from gaussnewton.experiments.figures import surface
        >>> result = surface.compute(points=21, directions=100)
        >>> [panel["title"] for panel in result["panels"]]
        ['W₁ = xU + yV', 'W₂ = xU + yV', 'W₁ = xU, W₂ = yV']
        >>> result["total"]["maxima_smooth"]
        0
    """
    net = _Network(data, inputs, hidden, outputs, seed)
    first, second = net.shapes
    W1, W2 = net.random(*first), net.random(*second)
    U1, V1, U2, V2 = (net.random(*shape) for shape in (first, first, second, second))
    axis = torch.linspace(-extent, extent, points, dtype=torch.float64)
    x, y = axis[:, None, None, None], axis[None, :, None, None]
    surfaces = {
        "W₁ = xU + yV": (x * U1 + y * V1, W2.expand(points, points, *second)),
        "W₂ = xU + yV": (W1.expand(points, points, *first), x * U2 + y * V2),
        "W₁ = xU, W₂ = yV": (
            (x * U1).expand(points, points, *first),
            (y * V2).expand(points, points, *second),
        ),
    }
    panels: list[dict[str, Any]] = []
    for title, weights in surfaces.items():
        E, pattern = net.error(*weights)
        panels.append(
            {
                "title": title,
                "x": axis.tolist(),
                "y": axis.tolist(),
                "E": [[float(f"{value:.6g}") for value in row] for row in E.tolist()],
                "check": maxima_on_grid(E, pattern),
            }
        )
    counts = ("points", "smooth", "kinks", "maxima_smooth", "maxima_kinks")
    return {
        "figure": "surface",
        "panels": panels,
        "total": {key: sum(panel["check"][key] for panel in panels) for key in counts},
        "directions": _along_directions(net, directions),
        "settings": {"data": data, "inputs": inputs, "hidden": hidden, "outputs": outputs,
                     "points": points, "extent": extent, "seed": seed},
    }  # fmt: skip


def _along_directions(net: _Network, count: int, step: float = 0.02) -> dict[str, Any]:
    """Three points on a line in one layer's weights, at random places of both layers."""
    first, second = net.shapes
    W1, W2 = net.random(count, *first), net.random(count, *second)
    D1, D2 = net.random(count, *first), net.random(count, *second)
    in_first = (torch.arange(count) % 2 == 0)[:, None, None]
    D1, D2 = step * D1 * in_first, step * D2 * ~in_first
    sides = [net.error(W1 + sign * D1, W2 + sign * D2) for sign in (-1, 0, 1)]
    (before, left), (middle, own), (after, right) = sides
    smooth = ((left == own) & (right == own)).all(-1)
    return maxima_on_lines(before, middle, after, smooth)


def caption(result: dict[str, Any]) -> str:
    """What the figure shows and what was found on it."""
    total, lines = result["total"], result["directions"]
    return (
        "The error of a two-layer ReLU network with squared error along two random directions. Of "
        f"{total['points']:,} inner points, {total['smooth']:,} lie inside a smooth region, with "
        f"{total['maxima_smooth']} local maxima; at kinks there are {total['maxima_kinks']}"
        f"{' (marked)' if total['maxima_kinks'] else ''}. Along {lines['points']:,} random "
        f"directions in one layer, {lines['smooth']:,} of them smooth: {lines['maxima_smooth']} "
        f"maxima where it is smooth and {lines['maxima_kinks']} at kinks."
    )


def draw(result: dict[str, Any]) -> matplotlib.figure.Figure:
    """The three surfaces, with the maxima at kinks marked."""
    figure = canvas(11.0, 3.7)
    for k, panel in enumerate(result["panels"]):
        height = require("matplotlib.colors", "drawing figures").PowerNorm(0.4)
        axes: Any = figure.add_subplot(1, 3, k + 1, projection="3d", computed_zorder=False)
        x, y, E = (torch.tensor(panel[key]) for key in ("x", "y", "E"))
        X, Y = torch.meshgrid(x, y, indexing="ij")
        # As an image: thousands of tiles would make the page slow.
        axes.plot_surface(
            X.numpy(), Y.numpy(), E.numpy(), cmap="cividis",
            norm=height, rcount=len(x), ccount=len(y),
            linewidth=0, antialiased=False, rasterized=True, zorder=1,
        )  # fmt: skip
        marks = panel["check"]["places"]
        if marks:
            i, j = torch.tensor(marks).T
            axes.plot(
                x[i].numpy(), y[j].numpy(), E[i, j].numpy(), "o", color=COLOURS["kfac"],
                markersize=6, markeredgecolor="white", zorder=3,
            )  # fmt: skip
        axes.set_title(f"({'abc'[k]})  {panel['title']}", fontsize=10, color=INK, y=0.98)
        _dress(axes)
    total = result["total"]
    note(
        figure,
        f"{total['smooth']:,} of {total['points']:,} inner grid points are smooth, with "
        f"{total['maxima_smooth']} local maxima among them; {total['maxima_kinks']} at kinks"
        + (" (orange)" if total["maxima_kinks"] else ""),
    )
    return figure


def _dress(axes: Any) -> None:
    ticker = require("matplotlib.ticker", "drawing figures")
    axes.patch.set_alpha(0)
    axes.view_init(elev=32, azim=-55)
    axes.set_box_aspect((1, 1, 0.75), zoom=0.95)
    for axis, name in zip((axes.xaxis, axes.yaxis, axes.zaxis), ("x", "y", "E"), strict=True):
        axis.pane.set_alpha(0)
        axis.line.set_color(MUTED)
        axis.set_label_text(name, color=INK, fontsize=9)
        axis.set_tick_params(labelsize=7, labelcolor=INK, color=MUTED, pad=0)
        axis.labelpad = -2
        axis.set_major_locator(ticker.MaxNLocator(5))
        axis._axinfo["grid"].update(color=MUTED, linewidth=0.3)
