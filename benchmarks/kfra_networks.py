"""How well KFRA's steps point along the exact ones in networks that are no chains.

For each trained layer, the cosine of the damped step (C̃ + kI)⁻¹ g with that of the exact
Gauss-Newton block, found by conjugate gradients; beside KFAC's and KFLR's. Run as

    python benchmarks/kfra_networks.py --save benchmarks/results/kfra_networks.md
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import gaussnewton as gn

DAMPING = 1e-2
"""k, as a share of the mean diagonal entry of KFLR's blocks."""

METHODS: dict[str, gn.Estimator] = {
    "kfra": gn.KFRA(),
    "kfra reduce": gn.KFRA(sharing="reduce"),
    "kfac": gn.KFAC(),
    "kflr": gn.KFLR(),
    "kflr reduce": gn.KFLR(sharing="reduce"),
}


class ResidualMLP(nn.Module):
    """Three residual blocks of tanh units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 20)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20)) for _ in range(3)
        )
        self.last = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class SmallCNN(nn.Module):
    """Convolutions, maxima, and a linear layer on the flattened feature map."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(1, 6, 3, padding=1)
        self.c2 = nn.Conv2d(6, 10, 3, padding=1)
        self.f1 = nn.Linear(90, 20)
        self.f2 = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2)
        return self.f2(F.relu(self.f1(x.flatten(1))))


class ResNet(nn.Module):
    """Residual convolutions with group normalisation, one of them strided; the mean at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.a1, self.a2 = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.n1, self.n2 = nn.GroupNorm(2, 8), nn.GroupNorm(2, 8)
        self.b1 = nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False)
        self.b2 = nn.Conv2d(12, 12, 3, padding=1, bias=False)
        self.m1, self.m2 = nn.GroupNorm(2, 12), nn.GroupNorm(2, 12)
        self.shortcut = nn.Conv2d(8, 12, 1, stride=2)
        self.last = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.n2(self.a2(F.relu(self.n1(self.a1(x))))))
        x = F.relu(self.shortcut(x) + self.m2(self.b2(F.relu(self.m1(self.b1(x))))))
        return self.last(x.mean((2, 3)))


class Transformer(nn.Module):
    """An embedding, one block with attention of two heads, the mean over the sequence."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.table = nn.Embedding(20, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)
        self.last = nn.Linear(width, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(2, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.last(x.mean(1))


@dataclass(frozen=True)
class Problem:
    """A model and how its data are made: classes that depend on the inputs."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    classes: int


PROBLEMS = {
    "residual MLP": Problem(ResidualMLP, lambda: torch.randn(200, 16), 10),
    "CNN": Problem(SmallCNN, lambda: _images(60, 12), 10),
    "ResNet with GroupNorm": Problem(ResNet, lambda: _images(60, 8), 10),
    "transformer block": Problem(Transformer, lambda: torch.randint(20, (60, 8)), 5),
}


def _images(count: int, size: int) -> Tensor:
    """Smooth noise, so that neighbouring pixels know of each other as in pictures."""
    return F.avg_pool2d(torch.randn(count, 1, size + 2, size + 2), 3, 1) * 3


def measure(name: str, steps: int) -> tuple[gn.Alignment, dict[str, float]]:
    """Train a little, so that nothing is at its random start; then compare the steps."""
    problem = PROBLEMS[name]
    torch.manual_seed(0)
    model, x = problem.model(), problem.inputs()
    features = x.flatten(1).float()
    y = (features @ torch.randn(features.shape[1], problem.classes)).argmax(1)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    model = model.double()
    batch = (x.double() if x.is_floating_point() else x, y)
    traces = gn.curvature(model, criterion, batch, method="kflr")
    size = sum(block.rows * block.columns for block in traces.values())
    k = DAMPING * sum(float(block.trace()) for block in traces.values()) / size
    seconds = {}
    for title, method in METHODS.items():
        start = time.process_time()
        gn.curvature(model, criterion, batch, method=method)
        seconds[title] = time.process_time() - start
    found = gn.alignment(
        model, criterion, batch, list(METHODS.values()), "exact", damping=k, max_iterations=400
    )
    return found, seconds


def table(name: str, steps: int) -> str:
    """One problem's cosines, as Markdown."""
    found, seconds = measure(name, steps)
    titles = dict(zip(found.whole, METHODS, strict=True))
    rows: list[list[str]] = []
    for layer, cosines in found.layers.items():
        rows.append([layer, *(f"{cosines[step]:.3f}" for step in titles)])
    rows.append(["whole, full GN", *(f"{found.whole[step]:.3f}" for step in titles)])
    rows.append(["CPU seconds", *(f"{seconds[title]:.3f}" for title in titles.values())])
    body = tabulate(rows, ["layer", *titles.values()], tablefmt="github", disable_numparse=True)
    residual = max(s.residual for s in (found.whole_solve, *found.layer_solves.values()))
    return (
        f"## {name}\n\n{body}\n\n{found.data} data, {steps} steps of Adam before; k = "
        f"{found.damping:.2g}; largest residual of a reference step {residual:.0e}.\n"
    )


def main() -> None:
    """Print the tables, and save them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--problem", choices=list(PROBLEMS), nargs="*", default=list(PROBLEMS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    parts = []
    for name in arguments.problem:
        parts.append(table(name, arguments.steps))
        print(parts[-1], flush=True)
    if arguments.save is not None:
        head = (
            "# KFRA in networks that are no chains\n\nCosines of each layer's damped step with "
            "that of its exact Gauss-Newton block, by\n\n    python benchmarks/kfra_networks.py "
            f"--save {arguments.save}\n\n`reduce` is `sharing='reduce'` of the estimators; "
            "CPU seconds are those of one estimate, on one thread.\n"
        )
        arguments.save.write_text("\n".join([head, *parts]))


if __name__ == "__main__":
    main()
