"""The cost of curvature and of J·v in convolutional networks, phase by phase.

In units of the forward + backward of the same batch. Everything is measured in one run: rounds in
which each contender takes one turn, in a shuffled order; what is reported is the best turn of
each. Time is that of the thread on its processor, so that other programs on it do not count; run
it with one thread, which is what it sets.

What is counted:

- ``gn.curvature`` as a user calls it: the recorded forward pass, the loss's Hessian or its draws,
  vectors back to every layer, Q and G of every layer, and all checks.
- Its phases by themselves: the forward pass; Q of all layers, from the recorded inputs; vectors
  back, from the recorded graph; G of all layers, from vectors that have come back.
- J·v as the optimiser asks for it at each step: the Gram matrix of one direction of each layer
  and one of all layers, with the pass that is run again for it.

Memory is the most that tensors take at once during a call beyond what they took before it, as
torch's profiler sees them, all of the forward pass included.

Run it from the repository's root::

    python benchmarks/networks_cost.py
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import gaussnewton as gn
from gaussnewton.estimators import shared
from gaussnewton.network import Network
from gaussnewton.observer import Observer
from gaussnewton.passage import passage_of
from gaussnewton.quadratic import gauss_newton_gram

DATA = 128
WORKSPACE = gn.KFLR().workspace


def convolutional(*head: nn.Module) -> nn.Sequential:
    """Two convolutions on images of MNIST's size."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *head,
    )


class Residual(nn.Module):
    """A few 3 × 3 convolutions of which each adds to what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x.relu())
        return self.last(x.relu().mean((2, 3)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "conv-conv-linear": lambda: convolutional(nn.Linear(1568, 10)),
    "conv-conv-linear-linear": lambda: convolutional(
        nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10)
    ),
    "residual": Residual,
}


class Task:
    """A network and a batch, and everything that is measured on them."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, self.criterion = NETWORKS[name](), nn.CrossEntropyLoss()
        self.x, self.y = torch.rand(DATA, 1, 28, 28), torch.randint(10, (DATA,))
        self.network = self._network()
        hessian = self.network.record.geometry.hessian(*self.network.record.wide)
        self.roots = hessian.roots().rows.transpose(0, 1)
        self.gradients = list(self.network.gradients(self.roots[:1]))
        self._observe()

    def _network(self) -> Network:
        with gn.Tape(self.model, self.criterion) as tape:
            self.forward()
        network = passage_of(tape.record)
        assert isinstance(network, Network)
        return network

    def _observe(self) -> None:
        """A pass as the optimiser sees it, and directions as it has them."""
        observer = Observer(self.model, self.criterion)
        self.forward().backward()
        self.observations = observer.take()
        self.observer = observer
        self.observations[0].passage  # noqa: B018  what curvature has asked for already
        groups = list(observer.theta)
        self.layers = {g.name: torch.randn(g.rows, g.columns) for g in groups}
        self.previous = {g.name: torch.randn(1, g.rows, g.columns) for g in groups}

    def forward(self) -> Tensor:
        return self.criterion(self.model(self.x), self.y)

    def forward_backward(self) -> None:
        self.model.zero_grad()
        self.forward().backward()

    def curvature(self, method: gn.Estimator) -> Any:
        return gn.curvature(self.model, self.criterion, (self.x, self.y), method=method)

    def input_moments(self) -> None:
        theta = self.network.record.theta
        for name, calls in self.network.calls.items():
            shared._input_moment(theta[name], calls, "expand", WORKSPACE, None)

    def vectors_back(self, count: int) -> None:
        step = self.network.rows_at_once(WORKSPACE)
        for part in self.roots[:count].split(step):
            list(self.network.gradients(part))

    def gradient_moments(self, count: int) -> None:
        for _ in range(count):
            for call, rows in self.gradients:
                call.rule.gradient_moment(call.module, rows)

    def jacobian_products(self, part: float) -> Tensor:
        with self.observer.paused():
            return gauss_newton_gram(self.observations, self.layers, self.previous, part, 1)

    def contenders(self) -> dict[str, Callable[[], Any]]:
        """What is measured, the unit first."""
        rank = len(self.roots)
        return {
            "forward + backward": self.forward_backward,
            "forward": self.forward,
            "gn.curvature, KFLR": lambda: self.curvature(gn.KFLR()),
            "gn.curvature, KFAC": lambda: self.curvature(gn.KFAC()),
            "Q of all layers": self.input_moments,
            f"{rank} vectors back": lambda: self.vectors_back(rank),
            f"G of {rank} vectors": lambda: self.gradient_moments(rank),
            "1 vector back": lambda: self.vectors_back(1),
            "G of 1 vector": lambda: self.gradient_moments(1),
            f"J·v, {len(self.layers)} + 1 directions": lambda: self.jacobian_products(1.0),
        }

    def memory(self) -> dict[str, Callable[[], Any]]:
        """What the memory is measured of."""
        small = 4 * 2**20
        return {
            "forward + backward": self.forward_backward,
            "gn.curvature, KFLR": lambda: self.curvature(gn.KFLR()),
            "gn.curvature, KFLR, workspace of 4 MiB": lambda: self.curvature(
                gn.KFLR(workspace=small)
            ),
            "gn.curvature, KFAC": lambda: self.curvature(gn.KFAC()),
            f"J·v, {len(self.layers)} + 1 directions": lambda: self.jacobian_products(1.0),
        }


def thread_seconds(run: Callable[[], Any]) -> float:
    """The time of one call, the garbage of others collected before it."""
    gc.collect()
    gc.disable()
    try:
        start = time.thread_time()
        result = run()
        seconds = time.thread_time() - start
    finally:
        gc.enable()
    del result
    return seconds


def best_seconds(contenders: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The best turn of each."""
    names = list(contenders)
    best = dict.fromkeys(names, float("inf"))
    for turn in range(repeats + 1):
        random.Random(turn).shuffle(names)
        for name in names:
            seconds = thread_seconds(contenders[name])
            best[name] = min(best[name], seconds) if turn else best[name]  # the first warms up
    return best


def peak_mebibytes(run: Callable[[], Any]) -> float:
    """The most that is allocated at once, beyond what there was."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    taken = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            taken += event.nbytes()
            most = max(most, taken)
    return most / 2**20


def measure(name: str, repeats: int) -> list[dict[str, Any]]:
    """The lines of a network's table."""
    task = Task(name)
    best = best_seconds(task.contenders(), repeats)
    unit = best["forward + backward"]
    rows: list[dict[str, Any]] = [
        {"what": what, "ms": 1e3 * seconds, "units": seconds / unit, "peak_mib": None}
        for what, seconds in best.items()
    ]
    by_name = {row["what"]: row for row in rows}
    for what, run in task.memory().items():
        row = by_name.get(what) or {"what": what, "ms": None, "units": None}
        row["peak_mib"] = peak_mebibytes(run)
        rows += [] if what in by_name else [row]
    return rows


def markdown(command: str, repeats: int, results: dict[str, list[dict[str, Any]]]) -> str:
    """The report."""
    facts = {
        "command": command,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch threads": torch.get_num_threads(),
        "data": f"{DATA} images of 1 × 28 × 28, 10 classes, CrossEntropyLoss, float32",
        "repeats": repeats,
    }
    parts = [
        "# Curvature and J·v of convolutional networks",
        "Written by `benchmarks/networks_cost.py`, whose docstring says what is counted and how. "
        "One *unit* is the forward + backward of the same batch, the first line of each table.",
        "\n".join(f"- {name}: `{value}`" for name, value in facts.items()),
    ]
    for name, rows in results.items():
        cells = [
            [
                row["what"],
                *(
                    "" if row[key] is None else format(row[key], form)
                    for key, form in (("ms", ".1f"), ("units", ".2f"), ("peak_mib", ".1f"))
                ),
            ]
            for row in rows
        ]
        headers = ["what", "best ms", "units", "peak MiB"]
        align = ["left", "right", "right", "right"]
        table = tabulate(cells, headers, tablefmt="github", colalign=align, disable_numparse=True)
        parts += [f"## {name}", f"```\n{NETWORKS[name]()}\n```", table]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--repeats", type=int, default=20, help="rounds (default 20)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/networks_cost.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = " ".join(arguments.networks)
    command = f"python benchmarks/networks_cost.py --networks {names} --repeats {arguments.repeats}"
    results = {}
    for name in arguments.networks:
        results[name] = measure(name, arguments.repeats)
        text = markdown(command, arguments.repeats, results)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text, encoding="utf-8")
        raw = json.dumps({"command": command, "networks": results}, indent=1)
        arguments.output.with_suffix(".json").write_text(raw + "\n", encoding="utf-8")
    print(arguments.output.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
