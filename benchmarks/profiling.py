"""Where the time of an update goes: seconds, GFLOP and GFLOP/s of each phase.

The paper's MNIST autoencoder, with ``gn.GaussNewton``'s defaults and with everything fresh in
every update (curvature, inverses, J·v on the whole batch), beside forward and backward passes of
the same batch, and beside what products and factorisations are needed on paper. The images are
MNIST's, because how often the optimiser looks at what depends on how training goes::

    .venv/bin/python benchmarks/profiling.py --data FOLDER

Seconds are the best of repeats of the same update, so that a noisy machine does less harm. Before
each update the two passes are made of the same batch by a twin of the model that has no optimiser,
as often and in the same moments: that is what a pass is. The
peak is that of a matrix product, measured in the same run. Curvature is estimated more rarely as
training goes on: the defaults' table is of updates 201 to 240, and the mean of the first 200, the
dear first ones included, stands beside it. Multiplications and additions are counted by
``torch.profiler``, those of factorisations by their shapes. Memory is the most that torch has
allocated at a time in the first 120 updates, the last of which are carried on, less the most in a
loop without an optimiser.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from tabulate import tabulate
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import gaussnewton as gn
from gaussnewton.experiments.data import mnist

ENCODER = (784, 1000, 500, 250, 30)
SIZES = (*ENCODER, *ENCODER[-2::-1])
MEASURED = 120
PHASES = "gaussnewton: "
LOOP = "forward and backward"
ALONE = "the same without an optimiser"
# Multiplications and additions of LAPACK's routines for a first argument [d, k], in d² k.
LAPACK = {
    "aten::linalg_cholesky_ex": 1 / 3,
    "aten::cholesky_inverse": 2 / 3,
    "aten::cholesky_solve": 2,
}

FRESH: dict[str, Any] = {
    "curvature": "kfra",
    "damping": gn.Damping(anneal=False, tau_interval=10_000),
    "step_size": gn.StepSize(momentum=False, calibrate=False, ask=1, part=1.0),
    "refresh": gn.Refresh(curvature=1, inverse=1),
}
"""An update of the paper's with everything fresh; ρ, of which the paper has one every five
updates, is left out."""


Images = Float[Tensor, "batches n pixels"]


def batches_of(folder: Path, batch: int) -> Images:
    """MNIST's training images, batch by batch."""
    x, _ = mnist(folder)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.stack(x[order].split(batch)[: len(x) // batch])


def autoencoder() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(SIZES):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def paper_counts(batch: int, part: float, calibrated: bool, momentum: bool) -> dict[str, float]:
    """GFLOP of the products that each phase needs once, symmetric ones in full."""
    layers = list(pairwise(SIZES))
    through = sum(2 * a * b for a, b in layers)
    first = 2 * layers[0][0] * layers[0][1]
    moments = sum(2 * batch * (a + 1) ** 2 for a, _ in layers)
    slopes = sum(2 * batch * b * b for _, b in layers[:-1])
    recursion = sum(2 * (b * b * a + b * a * a) for a, b in layers[1:])
    inverses = sum((a + 1) ** 3 + b**3 for a, b in layers)
    solve = sum(2 * (b * b * (a + 1) + b * (a + 1) ** 2) for a, b in layers)
    along = 2 * through - first  # a tangent of all layers: through each layer, and from each
    each = sum((i + 1) * 2 * a * b for i, (a, b) in enumerate(layers))
    tangents = (each if calibrated else along) + (along if momentum else 0)
    flop = {
        LOOP: batch * (3 * through - first),
        "curvature": moments + slopes + recursion,
        "inversion": inverses,
        "step size": solve + part * batch * tangents,
        "a forward pass": batch * through,
    }
    return {name: count / 1e9 for name, count in flop.items()}


@dataclass
class Costs:
    """What updates cost: seconds and GFLOP by phase, for each of them.

    Attributes:
        updates: how many they are.
        seconds: of each phase, for each update.
        gflop: of each phase, in all.
        alone: seconds of the two passes without an optimiser, the mean.
        before: in units of these, what updates before them cost, the mean.
    """

    updates: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    gflop: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    alone: float = 0.0
    before: float = 0.0


class Loop:
    """A training loop, as a user would write it."""

    def __init__(self, images: Images, settings: dict[str, Any], twin: bool = True) -> None:
        self.model, self.criterion = autoencoder(), nn.BCEWithLogitsLoss()
        self.optimizer = gn.GaussNewton(self.model, self.criterion, **settings)
        self.twin = autoencoder() if twin else None
        self.images, self.t = images, 0

    def update(self) -> dict[str, float]:
        """One update; returns its seconds by phase, and those of the two passes alone."""
        x = self.images[self.t % len(self.images)]
        self.t += 1
        begun = time.perf_counter()
        if self.twin is not None:
            nn.functional.binary_cross_entropy_with_logits(self.twin(x), x).backward()
            self.twin.zero_grad()
        started = time.perf_counter()
        self.optimizer.zero_grad()
        self.criterion(self.model(x), x).backward()
        between = time.perf_counter()
        self.optimizer.step()
        ended = time.perf_counter()
        phases: dict[str, float] = self.optimizer.diagnostics["seconds"]
        rest = ended - between - sum(phases.values())
        return {ALONE: started - begun, LOOP: between - started, **phases, "the rest": rest}


def measure(
    images: Images, settings: dict[str, Any], first: int, count: int, repeats: int
) -> Costs:
    """Seconds and GFLOP of some updates, each the best of the same update of several runs."""
    costs = Costs(updates=count)
    found = []
    for _ in range(repeats):
        loop = Loop(images, settings)
        found.append([loop.update() for _ in range(first + count - 1)])
    alone = [min(run.pop(ALONE) for run in same) for same in zip(*found, strict=True)]
    bests = [
        min(same, key=lambda phases: sum(phases.values())) for same in zip(*found, strict=True)
    ]
    costs.alone = sum(alone[first - 1 :]) / count
    costs.before = sum(sum(best.values()) for best in bests[: first - 1]) / sum(alone[: first - 1])
    for best in bests[first - 1 :]:
        for phase, seconds in best.items():
            costs.seconds[phase].append(seconds)
    loop = Loop(images, settings, twin=False)
    for _ in range(first - 1):
        loop.update()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as seen:
        for _ in range(count):
            loop.update()
    for event in seen.events():
        flop = event.flops or _lapack(event)
        if flop and not _inside(event, "aten::"):
            costs.gflop[_phase(event)] += flop / 1e9
    return costs


def _lapack(event: Any) -> float:
    cubes = LAPACK.get(event.name, 0)
    return cubes * event.input_shapes[0][0] ** 2 * event.input_shapes[0][1] if cubes else 0


def _inside(event: Any, name: str) -> bool:
    """Whether an operation is part of another that is counted."""
    parent = event.cpu_parent
    return parent is not None and (
        (parent.name.startswith(name) and (bool(parent.flops) or parent.name in LAPACK))
        or _inside(parent, name)
    )


def _phase(event: Any) -> str:
    while event is not None:
        if event.name.startswith(PHASES):
            return str(event.name.removeprefix(PHASES))
        event = event.cpu_parent
    return LOOP


def best_of(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some repeats."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def peak(size: int = 2000) -> float:
    """GFLOP/s of a matrix product."""
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    return 2 * size**3 / best_of(lambda: torch.mm(a, b, out=out), 30) / 1e9


def memory(images: Images, settings: dict[str, Any]) -> dict[str, float]:
    """MiB that the optimiser and a step take above model, gradients and the loop's own passes."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loop = Loop(images, settings, twin=False)
        for _ in range(MEASURED):
            loop.update()
    state = {id(t): t for s in loop.optimizer.state.values() for t in s.values() if _is(t)}
    inverses = {id(t): t for i in loop.optimizer._inverses.values() for t in vars(i).values()}
    kept = sum(t.nbytes for t in (state | inverses).values())
    parameters = sum(p.nbytes for p in loop.model.parameters())
    activations = images.shape[1] * sum(SIZES) * 4
    del loop
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as without:
        plain, x = autoencoder(), images[0]
        for _ in range(3):
            plain.zero_grad()
            nn.BCEWithLogitsLoss()(plain(x), x).backward()
    both = _highest(seen) - _highest(without)
    MiB = 2**20
    return {
        "parameters": parameters / MiB,
        "activations": activations / MiB,
        "kept": kept / MiB,
        "step": (both - kept) / MiB,
        "both": both / MiB,
        "bar": (8 * parameters + 1.5 * activations) / MiB,
    }


def _is(value: object) -> bool:
    return isinstance(value, Tensor)


def _highest(seen: profile) -> int:
    """The most bytes that were allocated above what there was at the start."""
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


def table(costs: Costs, counts: dict[str, float], unit: float, top: float) -> str:
    """One line a phase, and one for the whole update."""
    rows = []
    n = costs.updates
    for phase, seconds in costs.seconds.items():
        rows.append((phase, sum(seconds) / n, costs.gflop.get(phase, 0.0) / n, counts.get(phase)))
    rows.append(("an update", sum(r[1] for r in rows), sum(r[2] for r in rows), None))
    return tabulate(
        [
            (name, 1e3 * s, s / unit, g or None, on_paper, g / s if g else None, g / s / top)
            for name, s, g, on_paper in rows
        ],
        headers=("phase", "ms", "passes", "GFLOP", "once, on paper", "GFLOP/s", "of peak"),
        floatfmt=("", ".1f", ".2f", ".1f", ".1f", ".0f", ".0%"),
        tablefmt="pipe",
    )  # fmt: skip


def report(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The page, and its numbers."""
    batch, repeats = arguments.batch, arguments.repeats
    images, default = batches_of(arguments.data, batch), gn.StepSize()
    top = peak()
    runs = {
        "Everything fresh": (FRESH, 11, 5, 3 * repeats, paper_counts(batch, 1.0, False, False)),
        "Defaults": ({}, 201, 40, repeats, paper_counts(batch, default.part, True, False)),
    }
    parts, numbers = [], {}
    for name, (settings, first, count, times, counts) in runs.items():
        costs = measure(images, settings, first, count, times)
        top = max(top, peak())
        seconds = sum(map(sum, costs.seconds.values())) / count
        gflop = sum(costs.gflop.values()) / count
        numbers[name] = {
            "pass": costs.alone,
            "forward_backwards": seconds / costs.alone,
            "before": costs.before,
            "rate": gflop / seconds / top,
        }
        parts.append(
            f"## {name}\n\n{table(costs, counts, costs.alone, top)}\n\nUpdates {first} to "
            f"{first + count - 1}, {1e3 * costs.alone:.1f} ms a pass; an update before these took "
            f"{costs.before:.2f} passes.\n"
        )
    numbers["peak"] = top
    used = memory(images, {})
    numbers["memory"] = used
    parts.append(
        "## Memory\n\n"
        + tabulate(
            [(name, mib, mib / used["parameters"]) for name, mib in used.items()],
            headers=("what", "MiB", "times the parameters"),
            floatfmt=".1f",
            tablefmt="pipe",
        )
    )
    head = (
        f"# An update of the MNIST autoencoder, batch {batch}\n\n"
        "`.venv/bin/python benchmarks/profiling.py --data FOLDER "
        f"--threads {torch.get_num_threads()}`\n\n"
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; a matrix product reaches "
        f"{top:.0f} GFLOP/s. A pass is forward and backward of the batch without an optimiser.\n"
    )
    return "\n".join([head, *parts]) + "\n", numbers


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="MNIST's files")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/profiling.md")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    text, numbers = report(chosen)
    print(text)
    chosen.out.write_text(text)
    chosen.out.with_suffix(".json").write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
