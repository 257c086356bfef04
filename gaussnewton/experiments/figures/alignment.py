"""How steps align with exact Gauss-Newton steps along a trajectory (appendix F)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm.auto import tqdm

import gaussnewton as gn
from gaussnewton.experiments.extra import require
from gaussnewton.experiments.figures.style import canvas, dress, legend, line, note

if TYPE_CHECKING:
    import matplotlib.figure


def compute(
    model: nn.Module,
    criterion: nn.Module,
    batches: Iterator[Any],
    *,
    title: str = "",
    updates: Sequence[int] = (1, 2, 5, 10, 20, 50, 100),
    methods: Sequence[str] = ("kfra", "kfac", "kflr"),
    optimizer: gn.GaussNewton | None = None,
    weight_decay: float = 0.0,
    max_iterations: int = 250,
    tolerance: float = 1e-3,
    budget: str = "",
    stop: Callable[[int], bool] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Train along the trajectory of KFRA*, and look at the steps of all methods on the way.

    After each of the given numbers of updates the steps are compared on the next batch, with
    k = γ + η as the optimiser has it there. All methods see the same gradient and damping.

    Args:
        model: the network; it is trained.
        criterion: the loss.
        batches: endless, e.g. of :func:`gaussnewton.experiments.data.batches`.
        title: of the problem, e.g. "CURVES".
        updates: when to compare, in rising order, from 1.
        methods: which estimators; each with the exact and the factored inversion.
        optimizer: whose trajectory to follow; by default the paper's with KFRA and the factored
            inversion.
        weight_decay: η, if no optimiser is given; if one is, that of the optimiser is to be
            given here too.
        max_iterations: of conjugate gradients for each reference step.
        tolerance: of their residuals.
        budget: on what the figure rests, for the figure to say.
        stop: is told after each update how many points there are, and whether to end there.
        progress: show a bar.

    Returns:
        ``updates``, ``loss``, ``damping``; ``layers``: for each layer's name and each step
        ("kfra", "kfra*", …) the cosines by update; ``whole`` the same for the whole vector;
        ``block_diagonal``: cosines of the exact block-diagonal step with the full one;
        ``residuals``: the greatest of the layers' and the full one, and ``converged``, by update.

    Example:
        >>> import torch, gaussnewton as gn
        >>> from gaussnewton.experiments.data import batches
        >>> from gaussnewton.experiments.figures import alignment
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(),
        ...                             torch.nn.Linear(3, 4)).double()
        >>> data = batches(torch.randn(40, 4).double(), size=20)
        >>> result = alignment.compute(model, torch.nn.MSELoss(), data, updates=(1, 3))
        >>> result["updates"], sorted(result["layers"]), len(result["whole"]["kfra*"])
        ([1, 3], ['0', '2'], 2)
    """
    if list(updates) != sorted(set(updates)) or not updates or updates[0] < 1:
        raise ValueError(f"updates must rise from 1 or more, not {list(updates)}")
    if optimizer is None:
        settings = {**gn.PAPER, "curvature": "kfra", "inversion": "factored"}
        optimizer = gn.GaussNewton(model, criterion, weight_decay=weight_decay, **settings)
    result: dict[str, Any] = {
        "figure": "alignment", "title": title, "updates": [], "loss": [], "damping": [],
        "layers": {}, "whole": {}, "block_diagonal": [],
        "residuals": {"layers": [], "whole": []}, "converged": [],
        "settings": {"max_iterations": max_iterations, "tolerance": tolerance}, "budget": budget,
    }  # fmt: skip
    for t in tqdm(range(1, updates[-1] + 1), desc="alignment", disable=not progress):
        x, y = next(batches)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        if t in updates:
            damping = float(optimizer.diagnostics["gamma"]) + weight_decay
            x, y = next(batches)
            found = gn.alignment(
                model, criterion, (x, y), methods, damping=damping, weight_decay=weight_decay,
                max_iterations=max_iterations, tolerance=tolerance,
            )  # fmt: skip
            with torch.no_grad():
                loss = float(criterion(model(x), y))
            _append(result, found, t, loss)
        if stop is not None and stop(len(result["updates"])):
            break
    return result


def _append(result: dict[str, Any], found: gn.diagnostics.Alignment, t: int, loss: float) -> None:
    result["updates"].append(t)
    result["loss"].append(loss)
    result["damping"].append(found.damping)
    for name, cosines in found.layers.items():
        own = result["layers"].setdefault(name, {})
        for step, cosine in cosines.items():
            own.setdefault(step, []).append(cosine)
    for step, cosine in found.whole.items():
        result["whole"].setdefault(step, []).append(cosine)
    result["block_diagonal"].append(found.block_diagonal)
    worst = max(solve.residual for solve in found.layer_solves.values())
    result["residuals"]["layers"].append(worst)
    result["residuals"]["whole"].append(found.whole_solve.residual)
    result["converged"].append(found.converged)


def caption(result: dict[str, Any]) -> str:
    """What the figure shows, and how exact the exact steps are."""
    where = f"{result['title']}: c" if result["title"] else "C"
    return (
        f"{where}osine of each method's step with the exact Gauss-Newton step along the "
        "trajectory of KFRA*. Small panels: each layer with its own block. Right: the whole step "
        "with that of the full matrix; grey is the exact block-diagonal step. A star marks the "
        f"factored inversion (dashed). {_honesty(result)}."
    )


def _honesty(result: dict[str, Any]) -> str:
    layers, whole = (max(result["residuals"][key]) for key in ("layers", "whole"))
    most = result["settings"]["max_iterations"]
    return (
        f"The exact steps are conjugate gradients of at most {most} iterations; relative residuals "
        f"up to {layers:.1g} (layers) and {whole:.1g} (full)"
        + (f"; budget: {result['budget']}" if result.get("budget") else "")
    )


def draw(result: dict[str, Any]) -> matplotlib.figure.Figure:
    """The layers in two rows, as in the paper, and the whole vector beside them."""
    names = list(result["layers"])
    half = math.ceil(len(names) / 2)
    figure = canvas(2.1 * half + 4.2, 4.6)
    spec = figure.add_gridspec(2, half + 2)
    for i, name in enumerate(names):
        row, column = divmod(i, half)
        axes = figure.add_subplot(spec[row, column])
        dress(axes, f"layer {i + 1}", "update" if row or len(names) == 1 else "")
        _panel(axes, result["updates"], result["layers"][name])
        if column == 0:
            axes.set_ylabel("cosine, block GN", fontsize=9)
    axes = figure.add_subplot(spec[:, half:])
    dress(axes, " ".join([result["title"], "whole step, full GN"]).strip(), "update")
    _panel(axes, result["updates"], result["whole"])
    axes.plot(result["updates"], result["block_diagonal"], **_look("reference"))
    legend(figure, _handles(result), len(result["whole"]) + 1)
    note(figure, _honesty(result))
    return figure


def _panel(axes: Any, updates: list[int], cosines: dict[str, list[Any]]) -> None:
    known = {
        step: [math.nan if v is None else float(v) for v in values]  # JSON has no NaN
        for step, values in cosines.items()
    }
    for step, values in known.items():
        axes.plot(updates, values, **_look(step), marker=".", markersize=3.5)
    if updates[-1] >= 20 * updates[0]:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(
            require("matplotlib.ticker", "drawing figures").FuncFormatter(lambda v, _: f"{v:g}")
        )
    lowest = min((v for values in known.values() for v in values if math.isfinite(v)), default=0.0)
    axes.set_ylim(min(0.0, lowest) - 0.03, 1.03)


def _look(step: str) -> dict[str, Any]:
    """Wide below and thin above: KFRA and KFLR often lie upon each other."""
    method = step.rstrip("*")
    look = line(f"{method} dashed" if step.endswith("*") else method)
    wide, above = {"reference": (5.0, 1), "kflr": (3.4, 2), "kfac": (1.8, 3)}.get(method, (1.4, 4))
    faint = {"reference": 0.4, "kflr": 0.7}.get(method, 1.0)
    return {**look, "linewidth": wide, "zorder": above, "alpha": faint}


def _handles(result: dict[str, Any]) -> list[Any]:
    Line2D = require("matplotlib.lines", "drawing figures").Line2D
    steps = [Line2D([], [], label=step.upper(), **_look(step)) for step in result["whole"]]
    return [*steps, Line2D([], [], label="block-diagonal GN", **_look("reference"))]
