"""The rank of Monte-Carlo curvature matrices against its bound (section 6, appendix D)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.experiments.extra import require
from gaussnewton.experiments.figures.style import COLOURS, INK, MUTED, canvas, dress, legend, note

if TYPE_CHECKING:
    import matplotlib.figure

Problem = tuple[str, nn.Module, nn.Module, tuple[Tensor, Tensor]]
"""Title, small model in float64, criterion, batch."""

# Open and of falling size, so that marks in one place can all be seen.
_MARKS = (("o", "kfra", 9), ("s", "kfac", 6.5), ("^", "momentum", 5), ("+", "kflr", 7))


def problems(data: int = 60, seed: int = 0) -> list[Problem]:
    """Small networks of ten outputs, of one, and the mixture of section 5.2.

    Example:
        >>> from gaussnewton.experiments.figures import rank
        >>> [title for title, *_ in rank.problems(data=2)]
        ['ten classes', 'one output', 'mixture of two classifiers']
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x = torch.randn(data, 10).double()

        def network(hidden: int, outputs: int) -> nn.Module:
            layers = nn.Linear(10, hidden), nn.Tanh(), nn.Linear(hidden, outputs)
            return nn.Sequential(*layers).double()

        binary = torch.randint(2, (data,))
        return [
            ("ten classes", network(8, 10), nn.CrossEntropyLoss(), (x, torch.randint(10, (data,)))),
            ("one output", network(8, 1), nn.BCEWithLogitsLoss(), (x, binary[:, None].double())),
            ("mixture of two classifiers", network(8, 3), gn.BinaryMixtureLoss(), (x, binary)),
        ]


def compute(
    cases: Sequence[Problem] | None = None,
    *,
    counts: Sequence[int] = (1, 2, 4, 6, 8, 10, 14, 18, 22, 26, 30, 40, 50, 60),
    samples: Sequence[int] = (1, 2, 4),
    seed: int = 0,
) -> dict[str, Any]:
    r"""Numerical ranks of Ḡ and of the sampled Fisher as N and S grow.

    The bounds are :math:`\sum_n \mathrm{rank}(\mathcal H_{L,n})` and, for S samples a datum,
    NS; neither can exceed the number of parameters. Draws for one datum that are parallel, as
    for a single output, add nothing, and the rank stays below NS.

    Args:
        cases: title, model, criterion and batch of each panel; by default :func:`problems`.
        counts: values of N: so many data of each batch, from its beginning.
        samples: values of S.
        seed: of the draws.

    Returns:
        ``panels``, each with ``title``, ``parameters``, ``data`` (N) and ``series``: title, the
        ``rank`` and ``bound`` for each N. ``violations`` counts ranks above their bound.

    Example:
        >>> from gaussnewton.experiments.figures import rank
        >>> result = rank.compute(counts=(1, 3), samples=(1,))
        >>> result["panels"][0]["series"][0]
        {'title': 'Gauss-Newton', 'rank': [9, 27], 'bound': [9, 27]}
    """
    cases = problems(max(counts), seed) if cases is None else cases
    panels: list[dict[str, Any]] = []
    for title, model, criterion, (x, y) in cases:
        size = gn.Theta(model).size
        facts = [gn.diagnostics.gauss_newton_rank(model, criterion, (x[:n], y[:n])) for n in counts]
        series = [
            {
                "title": "Gauss-Newton",
                "rank": [fact.rank for fact in facts],
                "bound": [min(fact.bound, size) for fact in facts],
            }
        ]
        for S in samples:
            rows = _score_gradients(model, criterion, x[: max(counts)], y[: max(counts)], S, seed)
            series.append(
                {
                    "title": f"Fisher, S = {S}",
                    "rank": [_rank(rows[:n].flatten(0, 1)) for n in counts],
                    "bound": [min(n * S, size) for n in counts],
                }
            )
        panels.append({"title": title, "parameters": size, "data": list(counts), "series": series})
    pairs = [
        (r, b)
        for p in panels
        for s in p["series"]
        for r, b in zip(s["rank"], s["bound"], strict=True)
    ]
    return {
        "figure": "rank",
        "panels": panels,
        "checked": len(pairs),
        "violations": sum(r > b for r, b in pairs),
    }


def _score_gradients(
    model: nn.Module, criterion: nn.Module, x: Tensor, y: Tensor, samples: int, seed: int
) -> Float[Tensor, "n s p"]:
    """∇_θ log p(y|x) for S targets of each datum, drawn from the model."""
    theta = gn.Theta(model)
    outputs = model(x)
    generator = torch.Generator().manual_seed(seed)
    geometry = gn.losses.geometry_of(criterion)
    scores = geometry.sample(outputs.detach(), y, samples, generator)
    parameters = {key: p for group in theta for key, p in group.parameters.items()}
    rows = []
    for n, own in enumerate(scores):
        for score in own:
            weights = torch.zeros_like(outputs)
            weights[n] = score.reshape(outputs.shape[1:])
            parts = torch.autograd.grad(
                outputs, list(parameters.values()), weights, retain_graph=True
            )
            rows.append(theta.vector(dict(zip(parameters, parts, strict=True))))
    return torch.stack(rows).reshape(len(scores), samples, -1)


def _rank(rows: Float[Tensor, "m p"]) -> int:
    """Of rowsᵀ rows, by the rule of ``gauss_newton_rank``."""
    values = torch.linalg.eigvalsh(rows.T @ rows)
    tolerance = len(values) * torch.finfo(values.dtype).eps
    return int((values > tolerance * values.max()).sum())


def caption(result: dict[str, Any]) -> str:
    """What the figure shows and what was found on it."""
    vain = [panel["title"] for panel in result["panels"] if _samples_add_nothing(panel)]
    return (
        "Numerical rank (marks) of the Gauss-Newton matrix and of the Fisher matrix with S samples "
        "a datum, and the bounds of appendix D (lines): the sum of rank(H_L) over data, and NS. "
        f"{result['violations']} of {result['checked']} ranks exceed their bound."
        + (f" More samples add nothing for: {', '.join(vain)}." if vain else "")
    )


def _samples_add_nothing(panel: dict[str, Any]) -> bool:
    """Whether the Fisher matrix has the same rank for every S, though its bound rises."""
    fisher = [series for series in panel["series"] if series["title"].startswith("Fisher")]
    alike = all(series["rank"] == fisher[0]["rank"] for series in fisher)
    return alike and any(series["bound"] != fisher[0]["bound"] for series in fisher)


def draw(result: dict[str, Any]) -> matplotlib.figure.Figure:
    """A panel for each network."""
    lines = require("matplotlib.lines", "drawing figures")
    figure = canvas(3.7 * len(result["panels"]), 3.6)
    grid: Any = figure.subplots(1, len(result["panels"]), squeeze=False)
    handles: dict[str, Any] = {}
    for axes, panel in zip(grid[0], result["panels"], strict=True):
        dress(axes, panel["title"], "data N", "rank" if axes is grid[0, 0] else "")
        axes.axhline(panel["parameters"], color=MUTED, linestyle=":", linewidth=1)
        axes.annotate(
            f"{panel['parameters']} parameters", (1, panel["parameters"]), fontsize=8,
            xycoords=("axes fraction", "data"), ha="right", va="bottom", color=MUTED,
        )  # fmt: skip
        for (mark, colour, size), series in zip(_MARKS, panel["series"], strict=False):
            look = {
                "color": COLOURS[colour],
                "marker": mark,
                "markersize": size,
                "markerfacecolor": "none",
            }
            axes.plot(panel["data"], series["rank"], linestyle="none", **look)
            axes.plot(panel["data"], series["bound"], color=look["color"], linewidth=0.9)
            title = series["title"]
            handles[title] = lines.Line2D([], [], label=title, linewidth=0.9, **look)
        axes.set_ylim(0, 1.12 * panel["parameters"])
    handles["bound"] = lines.Line2D([], [], color=INK, linewidth=0.9, label="bound")
    legend(figure, list(handles.values()), len(handles))
    note(figure, f"{result['violations']} of {result['checked']} ranks exceed their bound")
    return figure
