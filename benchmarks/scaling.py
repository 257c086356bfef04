"""How time, memory and operations of an update grow with width, depth, outputs and batch.

Networks of linear layers with tanh between them, squared error. Each quantity grows while the
others stay; the exponent found is the slope of the upper half of the range in logarithms, by least
squares. Beside it stand the slope of the operations counted over the same points, and the exponent
that the formulae have in the limit::

    .venv/bin/python benchmarks/scaling.py --threads 2

*Update* is what ``optimizer.step()`` of ``gn.GaussNewton`` takes, the mean of one with fresh
curvature and inverses and of the next without; the default has one in five with them, and later
fewer. Forward and backward are not in it. It is measured without a limit on the width of factors
and with one of 1024. τ is given, so that no search for it is measured, and all else is the default.
Of several rounds the best counts: looks at ρ, a forward pass every fifth update, are then not in
it.

*Memory* is the peak of what torch's allocator hands out from before the optimiser is made to the
end of its second update, gradients and activations included, by the memory events of torch's
profiler. *Operations* are counted by ``torch.utils.flop_counter`` in the same run, Cholesky
factors and triangular solves added.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import gaussnewton as gn
from gaussnewton.experiments.figures.style import canvas, dress, legend, line, note

LIMIT = 1024
METHODS = (
    "forward + backward",
    "Adam's update",
    "GaussNewton's update",
    f"GaussNewton's update, tiles of {LIMIT}",
)
STYLES = ("reference", "adam", "gaussnewton", "kfra dashed")


@dataclass(frozen=True)
class Sweep:
    """One quantity that grows.

    Attributes:
        values: which it takes.
        sizes: from a value to the widths of all layers, the inputs first.
        batch: from a value to the number of data.
        limits: exponents of time in the limit, for each method.
        memory: of memory.
        why: what dominates an update.
    """

    values: tuple[int, ...]
    sizes: Callable[[int], tuple[int, ...]]
    batch: Callable[[int], int]
    limits: tuple[float, float, float, float]
    memory: tuple[float, float, float, float]
    why: str


SWEEPS = {
    "width": Sweep(
        (128, 256, 512, 1024, 2048, 4096),
        lambda d: (d, d, d),
        lambda _: 250,
        (2, 2, 3, 2),
        (2, 2, 2, 2),
        "d³ of the recursion and the inverses; in tiles d² times their width",
    ),
    "depth": Sweep(
        (2, 4, 8, 16, 32, 64),
        lambda L: (256,) * (L + 1),
        lambda _: 250,
        (1, 1, 2, 2),
        (1, 1, 1, 1),
        "J·v of each layer through all later ones, L² / 2; all else is L",
    ),
    "outputs": Sweep(
        (1, 4, 16, 64, 256, 1024, 4096),
        lambda K: (256, 256, K),
        lambda _: 250,
        (1, 1, 3, 1),
        (1, 1, 2, 1),
        "K³ of the last layer's inverse; in tiles K times the square of their width",
    ),
    "batch": Sweep(
        (10, 30, 100, 300, 1000, 3000, 10_000),
        lambda _: (256, 256, 256, 256),
        lambda n: n,
        (1, 0, 1, 1),
        (1, 0, 1, 1),
        "Q, f' and J·v of each datum; the recursion and the inverses know no data",
    ),
}


@dataclass
class Point:
    """What was measured of one method at one value."""

    value: int
    seconds: float
    mebibytes: float
    gflop: float
    phases: dict[str, float] = field(default_factory=dict)


def methods_of(sweep: Sweep) -> tuple[str, ...]:
    """A limit is measured where some layer exceeds it."""
    widest = max(max(sweep.sizes(value)) for value in sweep.values)
    return METHODS if widest > LIMIT else METHODS[:3]


class Task:
    """A network at work with one method."""

    def __init__(self, sizes: tuple[int, ...], batch: int, method: str) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for a, b in pairwise(sizes):
            layers += [nn.Linear(a, b), nn.Tanh()]
        self.model, self.criterion = nn.Sequential(*layers[:-1]), nn.MSELoss()
        self.x, self.y = torch.randn(batch, sizes[0]), torch.randn(batch, sizes[-1])
        self.method, self.optimizer = method, None

    def prepare(self) -> None:
        """Make the optimiser, if there is one."""
        if self.method == METHODS[1]:
            self.optimizer = torch.optim.Adam(self.model.parameters())
        elif self.method != METHODS[0]:
            self.optimizer = gn.GaussNewton(
                self.model,
                self.criterion,
                damping=gn.Damping(tau=1.0),
                refresh=gn.Refresh(early=0, curvature=2, growth=0.0),
                largest=LIMIT if self.method == METHODS[3] else None,
            )

    def backward(self) -> None:
        self.model.zero_grad()
        self.criterion(self.model(self.x), self.y).backward()

    def turn(self) -> tuple[float, dict[str, float]]:
        """The seconds of two updates, or of forward and backward; an average, and by phase."""
        if self.optimizer is None:
            return seconds_of(self.backward), {}
        total, phases = 0.0, dict[str, float]()
        for _ in range(2):
            self.backward()
            total += seconds_of(self.optimizer.step) / 2
            shown = getattr(self.optimizer, "diagnostics", {})
            for phase, seconds in shown.get("seconds", {}).items():
                phases[phase] = phases.get(phase, 0.0) + seconds / 2
        return total, phases


def seconds_of(run: Callable[[], Any]) -> float:
    """Of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cholesky_flop(shape: torch.Size, *_: Any, **__: Any) -> int:
    """d³ / 3 each."""
    return shape[:-2].numel() * (shape[-1] ** 3 // 3)


def cholesky_solve_flop(right: torch.Size, left: torch.Size, *_: Any, **__: Any) -> int:
    """Two triangular solves for each column."""
    return left[:-2].numel() * 2 * left[-1] ** 2 * right[-1]


FORMULAE = {
    torch.ops.aten.linalg_cholesky_ex: cholesky_flop,
    torch.ops.aten.cholesky_solve: cholesky_solve_flop,
}


def peak_and_operations(task: Task) -> tuple[float, float]:
    """Mebibytes at once, and 10⁹ operations of an average turn without the passes around it."""
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAE)
    events = [ProfilerActivity.CPU]
    with profile(activities=events, profile_memory=True) as seen, counter:
        task.prepare()
        task.turn()
    taken = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            taken += event.nbytes()
            most = max(most, taken)
    total = counter.get_total_flops()
    if task.optimizer is not None:
        with FlopCounterMode(display=False) as passes:
            task.backward()
        total = (total - 2 * passes.get_total_flops()) / 2
    return most / 2**20, total / 1e9


def measure(sweep: Sweep, method: str, value: int, budget: float) -> Point:
    """One point; rounds go on while they fit the seconds."""
    task = Task(sweep.sizes(value), sweep.batch(value), method)
    gc.collect()
    mebibytes, gflop = peak_and_operations(task)
    best, phases, begun, rounds = math.inf, dict[str, float](), time.perf_counter(), 0
    while rounds == 0 or (time.perf_counter() - begun < budget and rounds < 20):
        seconds, shown = task.turn()
        rounds += 1
        if seconds < best:
            best, phases = seconds, shown
    return Point(value, best, mebibytes, gflop, phases)


def slope(values: list[int], numbers: list[float]) -> float:
    """By least squares in logarithms, over the upper half of the range; NaN for zeros."""
    half = math.sqrt(values[0] * values[-1])
    points = [(v, n) for v, n in zip(values, numbers, strict=True) if v >= half * 0.999]
    if len(points) < 2 or any(n <= 0 for _, n in points):
        return math.nan
    x, y = (torch.tensor(part, dtype=torch.float64).log() for part in zip(*points, strict=True))
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())


def plain(number: float) -> str:
    """Three digits, and no powers of ten."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


Results = dict[str, dict[str, list[Point]]]


def table(name: str, found: dict[str, list[Point]]) -> str:
    """A line for each method, the numbers at all values and the exponents."""
    sweep = SWEEPS[name]
    parts = []
    for what, unit, limits in (
        ("seconds", "ms", sweep.limits), ("mebibytes", "MiB", sweep.memory)
    ):  # fmt: skip
        rows = []
        for limit, (method, points) in zip(limits, found.items(), strict=False):
            values = [p.value for p in points]
            numbers = [getattr(p, what) * (1e3 if unit == "ms" else 1) for p in points]
            exponents = [slope(values, numbers), limit]
            if unit == "ms":
                exponents.insert(1, slope(values, [p.gflop for p in points]))
            shown = ["" if math.isnan(e) else f"{e:.1f}" for e in exponents]
            rows.append([method, *map(plain, numbers), *shown])
        headers = [unit, *(str(v) for v in sweep.values if v in values)]
        headers += ["found", *["counted"] * (unit == "ms"), "in the limit"]
        align = ["left", *["right"] * (len(headers) - 1)]
        parts.append(tabulate(rows, headers, "github", colalign=align, disable_numparse=True))
    return "\n\n".join(parts)


def phase_table(method: str, points: list[Point]) -> str:
    """The phases of an update, with their exponents."""
    phases = list(dict.fromkeys(phase for p in points for phase in p.phases))
    rows = []
    for phase in phases:
        numbers = [1e3 * p.phases.get(phase, 0.0) for p in points]
        exponent = slope([p.value for p in points], numbers)
        rows.append([phase, *map(plain, numbers), f"{exponent:.1f}"])
    headers = [f"{method}, ms by phase", *(str(p.value) for p in points), "found"]
    align = ["left", *["right"] * (len(headers) - 1)]
    return tabulate(rows, headers, "github", colalign=align, disable_numparse=True)


def markdown(command: str, results: Results) -> str:
    """The report."""
    facts = {
        "command": command,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch threads": torch.get_num_threads(),
    }
    parts = [
        "# How the cost of an update grows",
        "Written by `benchmarks/scaling.py`, whose docstring says what is measured and how. "
        "*Found* is the exponent of the upper half of the range, *counted* that of the operations "
        "over the same points, *in the limit* what the formulae have.",
        "\n".join(f"- {name}: `{value}`" for name, value in facts.items()),
        "![time and memory by width, depth, outputs and batch](../../docs/figures/scaling.png)",
    ]
    for name, found in results.items():
        sweep = SWEEPS[name]
        example = sweep.sizes(sweep.values[-1])
        shape = f"{len(example) - 1} layers, {' × '.join(dict.fromkeys(map(str, example)))}"
        parts += [
            f"## {name}",
            f"The largest: {shape}, {sweep.batch(sweep.values[-1])} data. What dominates an "
            f"update: {sweep.why}.",
            table(name, found),
            *(phase_table(method, found[method]) for method in methods_of(sweep)[2:]),
        ]
    return "\n\n".join(parts) + "\n"


def draw(results: Results) -> Any:
    """Time above, memory below, a panel for each quantity."""
    figure = canvas(3.1 * len(results), 6.0)
    grid: Any = figure.subplots(2, len(results), squeeze=False)
    handles: dict[str, Any] = {}
    for column, (name, found) in enumerate(results.items()):
        for axes, what, label in (
            (grid[0, column], "seconds", "seconds"), (grid[1, column], "mebibytes", "MiB, peak")
        ):  # fmt: skip
            dress(axes, f"by {name}" if what == "seconds" else "", name, "" if column else label)
            axes.set(xscale="log", yscale="log")
            values = [p.value for p in next(iter(found.values()))]
            axes.set_xticks(values, [f"{v:,}" for v in values], fontsize=7)
            axes.minorticks_off()
            for style, (method, points) in zip(STYLES, found.items(), strict=False):
                x, y = [p.value for p in points], [getattr(p, what) for p in points]
                (handles[method],) = axes.plot(
                    x, y, label=method, marker="o", markersize=3, **line(style)
                )
            if what == "seconds":
                found_slopes = [
                    slope([p.value for p in points], [p.seconds for p in points])
                    for points in found.values()
                ]
                shown = ", ".join(f"{s:.1f}" for s in found_slopes)
                axes.set_title(f"by {name}: exponents {shown}", fontsize=9)
    legend(figure, list(handles.values()), 4)
    note(figure, "exponents of time in the upper half of the range, in the legend's order")
    return figure


def write(results: Results, command: str, output: Path, figure: Path) -> None:
    """The report, its numbers, and the figure."""
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(markdown(command, results), encoding="utf-8")
    raw = {
        name: {method: [asdict(p) for p in points] for method, points in found.items()}
        for name, found in results.items()
    }
    text = json.dumps({"command": command, "sweeps": raw}, indent=1)
    output.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    draw(results).savefig(figure, dpi=150, facecolor="white")


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--threads", type=int, default=2, help="of torch (default 2)")
    parser.add_argument("--most", type=int, default=10_000, help="leave out larger values")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds a point (default 2)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/scaling.md"))
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/scaling.png"))
    return parser.parse_args()


def main() -> None:
    given = arguments_of()
    torch.set_num_threads(given.threads)
    command = f"python benchmarks/scaling.py --threads {given.threads} --budget {given.budget:g}"
    command += "" if given.most == 10_000 else f" --most {given.most}"
    results: Results = {}
    begun = time.perf_counter()
    for name in given.sweeps:
        sweep = SWEEPS[name]
        values = [v for v in sweep.values if v <= given.most]
        results[name] = {method: [] for method in methods_of(sweep)}
        for value in values:
            for method in methods_of(sweep):
                point = measure(sweep, method, value, given.budget)
                results[name][method].append(point)
                at = time.perf_counter() - begun
                print(f"{at:4.0f} s  {name} {value}  {method}: {point.seconds:.4f} s", flush=True)
    write(results, command, given.output, given.figure)
    print(given.output.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
