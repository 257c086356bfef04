"""The loss by update of ``gn.GaussNewton`` with its defaults, beside Adam at 1e-3.

One table, one line a problem: nothing is set per problem. MNIST and the Olivetti faces are read
from a folder that ``--data`` names::

    .venv/bin/python benchmarks/optimiser.py --data FOLDER

Losses are of the training data; for GaussNewton with the averaged parameters.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

import torch
from tabulate import tabulate
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.experiments.data import curves, faces, mnist

Data = tuple[Tensor, Tensor]
ENCODER = (1000, 500, 250, 30)


@dataclass(frozen=True)
class Problem:
    """A network, a criterion, data, and how long to train."""

    sizes: tuple[int, ...]
    criterion: Callable[[], nn.Module]
    data: Callable[[Path], Data]
    batch: int
    updates: int
    activation: type[nn.Module] = nn.Tanh


def mnist_images(folder: Path) -> Data:
    x, _ = mnist(folder)
    return x, x


def generated_curves(_: Path) -> Data:
    x = curves()
    return x, x


def olivetti_patches(folder: Path) -> Data:
    x = faces(folder)
    return x, x


def products(_: Path) -> Data:
    x = torch.randn(10_000, 10, generator=torch.Generator().manual_seed(2))
    return x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3].square()


def autoencoder(width: int) -> tuple[int, ...]:
    return (width, *ENCODER, *ENCODER[-2::-1], width)


METHODS = ("Adam 1e-3", "gn.PAPER", "gn.GaussNewton")
BCE, CE, MSE = nn.BCEWithLogitsLoss, nn.CrossEntropyLoss, nn.MSELoss
PROBLEMS = {
    "MNIST autoencoder": Problem(autoencoder(784), BCE, mnist_images, 1000, 230),
    "CURVES autoencoder": Problem(autoencoder(784), BCE, generated_curves, 1000, 150),
    "FACES autoencoder": Problem(autoencoder(625), MSE, olivetti_patches, 1000, 150),
    "MNIST classifier": Problem((784, *ENCODER, 10), CE, mnist, 1000, 100),
    "the same, ReLU": Problem((784, *ENCODER, 10), CE, mnist, 1000, 100, nn.ReLU),
    "smaller, batch 50": Problem((784, 200, 100, 10), CE, mnist, 50, 1000),
    "smaller, batch 10,000": Problem((784, 200, 100, 10), CE, mnist, 10_000, 40),
    "regression, 1 output": Problem((10, 64, 64, 1), MSE, products, 500, 200),
    "regression, 20 layers": Problem((10, *[32] * 19, 1), MSE, products, 500, 200),
}


def network(problem: Problem, seed: int) -> nn.Sequential:
    """Linear layers with Glorot's initialisation."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(problem.sizes):
        linear = nn.Linear(a, b)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, problem.activation()]
    return nn.Sequential(*layers[:-1])


class Result(TypedDict):
    """The loss after some updates and seconds, and the seconds of all updates."""

    history: list[tuple[int, float, float]]
    seconds: float


def evaluate(model: nn.Module, criterion: nn.Module, x: Tensor, y: Tensor) -> float:
    """The loss of the first 10,000 data."""
    with torch.no_grad():
        return criterion(model(x[:10_000]), y[:10_000]).item()


def run(problem: Problem, method: str, folder: Path, seed: int) -> Result:
    """Train once; returns the losses along the way and the seconds taken by updates."""
    x, y = problem.data(folder)
    model, criterion = network(problem, seed), problem.criterion()
    if method == "Adam 1e-3":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    else:
        settings = gn.PAPER if method == "gn.PAPER" else {}
        optimizer = gn.GaussNewton(model, criterion, **settings)
    order = torch.Generator().manual_seed(seed)
    history, seconds, where, shuffled = [], 0.0, len(x), torch.arange(len(x))
    marks = {round(problem.updates * k / 20) for k in range(1, 21)} | {130, 165}
    for t in range(1, problem.updates + 1):
        if where + problem.batch > len(x):
            shuffled, where = torch.randperm(len(x), generator=order), 0
        part = shuffled[where : where + problem.batch]
        where += problem.batch
        started = time.perf_counter()
        optimizer.zero_grad()
        loss = criterion(model(x[part]), y[part])
        loss.backward()
        optimizer.step()
        seconds += time.perf_counter() - started
        if t in marks:
            judged = copy.deepcopy(model)
            if isinstance(optimizer, gn.GaussNewton):
                judged.load_state_dict(optimizer.averaged_parameters())
            history.append((t, seconds, evaluate(judged, criterion, x, y)))
    return {"history": history, "seconds": seconds}


def write(raw: dict[str, dict[str, Result]], seed: int, output: Path) -> None:
    """The table, and every loss along the way beside it."""
    methods = list(next(iter(raw.values())))
    rows = []
    for name, results in raw.items():
        row = [name, PROBLEMS[name].batch, PROBLEMS[name].updates]
        rows.append([*row, *(f"{results[method]['history'][-1][2]:.4g}" for method in methods)])
    header = ["problem", "batch", "updates", *methods]
    command = "python benchmarks/optimiser.py --data FOLDER"
    text = (
        "# Loss after the same number of updates\n\nWritten by `benchmarks/optimiser.py`, whose "
        f"docstring says how it measures: `{command} --seed {seed}`, "
        f"{torch.get_num_threads()} threads. Losses are means over outputs, as torch has them. All "
        "losses along the way are in the JSON file beside it.\n\n"
        + tabulate(rows, header, tablefmt="github", disable_numparse=True)
        + "\n"
    )
    output.parent.mkdir(exist_ok=True)
    output.write_text(text)
    output.with_suffix(".json").write_text(json.dumps(raw))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="MNIST's and Olivetti's files")
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["Adam 1e-3", "gn.GaussNewton"]
    )
    parser.add_argument("--seed", type=int, default=0)
    results = Path(__file__).parent / "results"
    parser.add_argument("--output", type=Path, default=results / "optimiser.md")
    options = parser.parse_args()
    raw: dict[str, dict[str, Result]] = {}
    for name in options.problems:
        problem = PROBLEMS[name]
        raw[name] = {m: run(problem, m, options.data, options.seed) for m in options.methods}
        write(raw, options.seed, options.output)
        print(name, {m: r["history"][-1] for m, r in raw[name].items()}, flush=True)


if __name__ == "__main__":
    main()
