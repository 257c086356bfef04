"""What factors in tiles lose: the loss of an autoencoder after some updates, by limit.

Generated curves, one seed, ``gn.GaussNewton`` with its defaults but for the estimator and
``largest``; and KFRA's step and tiles at the end of the first run, beside those without a limit::

    .venv/bin/python benchmarks/tiles.py --threads 1
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.chain import Chain
from gaussnewton.experiments.data import curves
from gaussnewton.tiles import tiled

SIZES = (784, 200, 100, 30, 100, 200, 784)
LIMITS = (None, 400, 100, 32, 1)
BATCH = 500
CRITERION = nn.BCEWithLogitsLoss()


class CutAfterwards(gn.KFRA):
    """KFRA whose recursion knows no limit; its blocks are cut."""

    def estimate(self, chain: Chain) -> dict[str, Any]:
        return gn.KFRA().estimate(chain)


ESTIMATORS: dict[str, type[gn.Estimator]] = {
    "loss, KFRA going on from tiles": gn.KFRA,
    "loss, KFRA cut afterwards": CutAfterwards,
    "loss, KFAC": gn.KFAC,
}


def network() -> nn.Sequential:
    """Glorot's initialisation."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(SIZES):
        linear = nn.Linear(a, b)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def train(
    x: Tensor, estimator: gn.Estimator, largest: int | None, updates: int
) -> tuple[nn.Module, gn.GaussNewton, float]:
    """The loss of the averaged parameters on 5000 data, summed over outputs."""
    model = network()
    optimizer = gn.GaussNewton(model, CRITERION, curvature=estimator, largest=largest)
    order = torch.Generator().manual_seed(0)
    for _ in range(updates):
        batch = x[torch.randperm(len(x), generator=order)[:BATCH]]
        optimizer.zero_grad()
        CRITERION(model(batch), batch).backward()
        optimizer.step()
    with torch.no_grad(), optimizer.averaged():
        loss = SIZES[-1] * float(CRITERION(model(x[:5000]), x[:5000]))
    return model, optimizer, loss


def beside_no_limit(
    model: nn.Module, x: Tensor, damping: float, largest: int | None
) -> tuple[float, float]:
    """The cosine of KFRA's step, and the greatest relative error of its tiles of G."""
    batch = x[:1000], x[:1000]
    whole, cut = (
        gn.curvature(model, CRITERION, batch, gn.KFRA(largest=limit)) for limit in (None, largest)
    )
    model.zero_grad()
    CRITERION(model(batch[0]), batch[1]).backward()
    gradient: Mapping[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    a, b = (whole.theta.vector(c.solve(gradient, damping)) for c in (whole, cut))
    errors = []
    for name, block in whole.items():
        T = tiled(block.numbers()["G"], largest)
        errors.append(float((cut[name].numbers()["G"] - T).norm() / T.norm()))
    return float(a @ b / (a.norm() * b.norm())), max(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/tiles.md"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    x = curves()[:10_000]
    rows = []
    first: tuple[nn.Module, float] | None = None
    for title, kind in ESTIMATORS.items():
        losses = []
        for largest in LIMITS:
            model, optimizer, loss = train(x, kind(), largest, given.updates)
            losses.append(f"{loss:.1f}")
            first = first or (model, float(optimizer.diagnostics["gamma"]))
        rows.append([title, *losses])
    assert first is not None
    found = [beside_no_limit(first[0], x, first[1], largest) for largest in LIMITS]
    rows.append(["KFRA's step, cosine with no limit", *(f"{c:.2f}" for c, _ in found)])
    rows.append(["KFRA's tiles of G, greatest relative error", *(f"{e:.2f}" for _, e in found)])
    headers = ["", *("no limit" if limit is None else str(limit) for limit in LIMITS)]
    align = ["left", *["right"] * len(LIMITS)]
    table = tabulate(rows, headers, "github", colalign=align, disable_numparse=True)
    command = f"python benchmarks/tiles.py --updates {given.updates} --threads {given.threads}"
    sizes = "-".join(map(str, SIZES))
    text = (
        "# What factors in tiles lose\n\nWritten by `benchmarks/tiles.py`, whose docstring says "
        f"what is measured: `{command}`. CURVES autoencoder {sizes}, {given.updates} updates of "
        f"{BATCH} data, seed 0; columns are `largest`.\n\n{table}\n"
    )
    given.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
