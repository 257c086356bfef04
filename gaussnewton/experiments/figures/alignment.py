"""How steps align with exact Gauss-Newton steps along a trajectory (appendix F)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm.auto import tqdm

import gaussnewton as gn
from gaussnewton.experiments.data import Batches
from gaussnewton.experiments.extra import require
from gaussnewton.experiments.figures.style import canvas, dress, legend, line, note

if TYPE_CHECKING:
    import matplotlib.figure


Point = dict[str, Any]
"""What was found after one update: plain values, ``layers`` and ``whole`` by step."""

METHODS = ("kfra", "kfac", "kflr")
MAX_ITERATIONS = 250
TOLERANCE = 1e-3


def compute(
    model: nn.Module,
    criterion: nn.Module,
    batches: Iterator[Any],
    *,
    title: str = "",
    updates: Sequence[int] = (1, 2, 5, 10, 20, 50, 100),
    methods: Sequence[str] = METHODS,
    optimizer: gn.GaussNewton | None = None,
    weight_decay: float = 0.0,
    max_iterations: int = MAX_ITERATIONS,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    budget: str = "",
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
        seed: of KFAC's draws.
        budget: on what the figure rests, for the figure to say.
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
    trajectory = Trajectory(
        model, criterion, batches, methods, optimizer, weight_decay, max_iterations, tolerance, seed
    )
    points = []
    for _ in tqdm(range(updates[-1]), desc="alignment", disable=not progress):
        trajectory.step()
        if trajectory.update in updates:
            points.append(trajectory.look())
    return gathered(
        points, title=title, budget=budget, max_iterations=max_iterations, tolerance=tolerance
    )


class Trajectory:
    """A network on its way along KFRA*, which can be looked at after any update.

    The arguments are those of :func:`compute`. What was saved on the way loads into a new one with
    the same arguments, and goes on bit for bit, if the batches are
    :class:`~gaussnewton.experiments.data.Batches`.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module,
        batches: Iterator[Any],
        methods: Sequence[str] = METHODS,
        optimizer: gn.GaussNewton | None = None,
        weight_decay: float = 0.0,
        max_iterations: int = MAX_ITERATIONS,
        tolerance: float = TOLERANCE,
        seed: int = 0,
    ) -> None:
        self.model, self.criterion, self.batches = model, criterion, batches
        self.methods, self.weight_decay, self.seed = methods, weight_decay, seed
        self.solving: dict[str, Any] = {"max_iterations": max_iterations, "tolerance": tolerance}
        self.optimizer = optimizer or _kfra_star(model, criterion, weight_decay)
        self.update, self.seconds = 0, 0.0

    def step(self) -> dict[str, Any]:
        """One update; what there is to say of it."""
        started = time.perf_counter()
        x, y = next(self.batches)
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.update += 1
        self.seconds += time.perf_counter() - started
        said = self.optimizer.diagnostics
        line = {"update": self.update, "seconds": self.seconds, "batch_loss": loss.item()}
        return line | {key: said.get(key) for key in ("tau", "gamma", "rho")}

    def look(self) -> Point:
        """Compare the steps of all methods on the next batch."""
        started = time.perf_counter()
        x, y = next(self.batches)
        found = gn.alignment(
            self.model, self.criterion, (x, y), [self._estimator(name) for name in self.methods],
            damping=float(self.optimizer.diagnostics["gamma"]) + self.weight_decay,
            weight_decay=self.weight_decay, **self.solving,
        )  # fmt: skip
        with torch.no_grad():
            loss = float(self.criterion(self.model(x), y))
        self.seconds += time.perf_counter() - started
        return {
            "update": self.update,
            "loss": loss,
            "damping": found.damping,
            "layers": {name: self._by_name(each) for name, each in found.layers.items()},
            "whole": self._by_name(found.whole),
            "block_diagonal": found.block_diagonal,
            "layers_residual": max(solve.residual for solve in found.layer_solves.values()),
            "whole_residual": found.whole_solve.residual,
            "converged": found.converged,
        }

    def _estimator(self, name: str) -> str | gn.KFAC:
        """New at each point, so that its draws do not hang on the points before."""
        return gn.KFAC(seed=self.seed) if name == "kfac" else name

    def _by_name(self, cosines: Mapping[str, float]) -> dict[str, float | None]:
        """By the names of methods, where an estimator has a longer one; JSON has no NaN."""
        long = repr(gn.KFAC(seed=self.seed))
        return {
            step.replace(long, "kfac"): value if math.isfinite(value) else None
            for step, value in cosines.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on bit for bit: plain values and tensors."""
        return {
            "update": self.update,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self._saved_batches().state_dict(),
            "random_state": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.update, self.seconds = state["update"], state["seconds"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._saved_batches().load_state_dict(state["batches"])
        torch.set_rng_state(state["random_state"])

    def _saved_batches(self) -> Batches:
        assert isinstance(self.batches, Batches)
        return self.batches


def _kfra_star(model: nn.Module, criterion: nn.Module, weight_decay: float) -> gn.GaussNewton:
    settings = {**gn.PAPER, "curvature": "kfra", "inversion": "factored"}
    return gn.GaussNewton(model, criterion, weight_decay=weight_decay, **settings)


def gathered(
    points: Sequence[Point],
    *,
    title: str = "",
    budget: str = "",
    max_iterations: int = MAX_ITERATIONS,
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """The figure's result from the points along a trajectory; see :func:`compute`."""
    layers: dict[str, dict[str, list[Any]]] = {}
    for point in points:
        for name, cosines in point["layers"].items():
            _append(layers.setdefault(name, {}), cosines)
    whole: dict[str, list[Any]] = {}
    for point in points:
        _append(whole, point["whole"])
    alone = ("loss", "damping", "block_diagonal", "converged")
    return {
        "figure": "alignment",
        "title": title,
        "updates": [point["update"] for point in points],
        **{key: [point[key] for point in points] for key in alone},
        "layers": layers,
        "whole": whole,
        "residuals": {
            key: [point[f"{key}_residual"] for point in points] for key in ("layers", "whole")
        },
        "settings": {"max_iterations": max_iterations, "tolerance": tolerance},
        "budget": budget,
    }


def _append(lists: dict[str, list[Any]], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        lists.setdefault(key, []).append(value)


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
    layers, whole = (
        max(math.inf if r is None else r for r in result["residuals"][key])  # JSON has no infinity
        for key in ("layers", "whole")
    )
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
