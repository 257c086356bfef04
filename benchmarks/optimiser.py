"""The loss by update of ``gn.GaussNewton`` with its defaults, beside Adam at 1e-3.

One table, one line a problem: nothing is set per problem. MNIST is read from a folder with its
four IDX files (gzip) that ``--data`` names::

    .venv/bin/python benchmarks/optimiser.py --data FOLDER

Losses are of the training data; for GaussNewton with the averaged parameters.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor, nn

import gaussnewton as gn

ENCODER = (1000, 500, 250, 30)


@dataclass(frozen=True)
class Problem:
    """A network, a criterion, data, and how long to train."""

    sizes: tuple[int, ...]
    criterion: Callable[[], nn.Module]
    data: Callable[[Path], tuple[Tensor, Tensor]]
    batch: int
    updates: int
    activation: type[nn.Module] = nn.Tanh


def idx(path: Path) -> Tensor:
    """The bytes of an IDX file, in its shape."""
    raw = gzip.decompress(path.read_bytes())
    dims = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    body = bytearray(raw[4 + 4 * len(dims) :])
    return torch.frombuffer(body, dtype=torch.uint8).reshape(dims)


def digits(folder: Path) -> Tensor:
    return idx(folder / "train-images-idx3-ubyte.gz")[:50_000].flatten(1).float() / 255


def mnist_images(folder: Path) -> tuple[Tensor, Tensor]:
    x = digits(folder)
    return x, x


def mnist_labels(folder: Path) -> tuple[Tensor, Tensor]:
    return digits(folder), idx(folder / "train-labels-idx1-ubyte.gz")[:50_000].long()


def curves(count: int, side: int) -> Tensor:
    """Images of smooth curves that three random points bend, one image a row."""
    axis = torch.linspace(-1, 1, side)
    across, down = torch.meshgrid(axis, axis, indexing="ij")
    first, middle, last = (1.6 * torch.rand(3, count, 1, 2) - 0.8).unbind()
    s = torch.linspace(0, 1, 2 * side)[None, :, None]
    points = (1 - s) ** 2 * first + 2 * s * (1 - s) * middle + s**2 * last
    x, y = points[..., 0, None, None], points[..., 1, None, None]
    distance = ((across - x) ** 2 + (down - y) ** 2).amin(1)
    return torch.exp(-distance / 0.02).flatten(1)


def drawn_curves(_: Path) -> tuple[Tensor, Tensor]:
    generator_state = torch.get_rng_state()
    torch.manual_seed(1)
    x = torch.cat([curves(1000, side=28) for _ in range(10)])
    torch.set_rng_state(generator_state)
    return x, x


def products(_: Path) -> tuple[Tensor, Tensor]:
    x = torch.randn(10_000, 10, generator=torch.Generator().manual_seed(2))
    return x, (x[:, :1] * x[:, 1:2]).sin() + x[:, 2:3].square()


def autoencoder(width: int) -> tuple[int, ...]:
    return (width, *ENCODER, *ENCODER[-2::-1], width)


METHODS = ("Adam 1e-3", "gn.PAPER", "gn.GaussNewton")
BCE, CE, MSE = nn.BCEWithLogitsLoss, nn.CrossEntropyLoss, nn.MSELoss
PROBLEMS = {
    "MNIST autoencoder": Problem(autoencoder(784), BCE, mnist_images, 1000, 230),
    "curves autoencoder": Problem(autoencoder(784), BCE, drawn_curves, 1000, 100),
    "MNIST classifier": Problem((784, *ENCODER, 10), CE, mnist_labels, 1000, 100),
    "the same, ReLU": Problem((784, *ENCODER, 10), CE, mnist_labels, 1000, 100, nn.ReLU),
    "the same, batch 50": Problem((784, 200, 100, 10), CE, mnist_labels, 50, 300),
    "the same, batch 10,000": Problem((784, 200, 100, 10), CE, mnist_labels, 10_000, 40),
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


def evaluate(model: nn.Module, criterion: nn.Module, x: Tensor, y: Tensor) -> float:
    """The loss of the first 10,000 data."""
    with torch.no_grad():
        return criterion(model(x[:10_000]), y[:10_000]).item()


def run(problem: Problem, method: str, folder: Path, seed: int) -> dict[str, object]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's files")
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["Adam 1e-3", "gn.GaussNewton"]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "optimiser.md"
    )
    options = parser.parse_args()
    methods = options.methods
    raw, rows = {}, []
    for name in options.problems:
        problem = PROBLEMS[name]
        raw[name] = {m: run(problem, m, options.data, options.seed) for m in methods}
        row = [name, problem.batch, problem.updates]
        for m in methods:
            row += [f"{raw[name][m]['history'][-1][2]:.4g}", f"{raw[name][m]['seconds']:.0f}"]
        rows.append(row)
        print(row, flush=True)
    header = ["problem", "batch", "updates"]
    for m in methods:
        header += [m, "s"]
    command = "python benchmarks/optimiser.py --data FOLDER"
    text = (
        "# Loss after the same number of updates\n\nWritten by `benchmarks/optimiser.py`, whose "
        f"docstring says how it measures: `{command} --seed {options.seed}`, "
        f"{torch.get_num_threads()} threads. Losses are means over outputs, as torch has them; "
        "`s` is the seconds of all updates.\n\n"
        + tabulate(rows, header, tablefmt="github", disable_numparse=True)
        + "\n"
    )
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(text)
    options.output.with_suffix(".json").write_text(json.dumps(raw))


if __name__ == "__main__":
    main()
