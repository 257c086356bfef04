"""What training data cost: milliseconds a batch beside those of an update, and memory.

A batch of 1000 is gathered, and one update of Adam, the cheapest method, is made with it; best of
repeats. Memory is the greatest that a process needs to make the data and a batch, torch itself
taken off (Linux only)::

    .venv/bin/python benchmarks/data.py --data FOLDER
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate

from gaussnewton.experiments.data import Batches
from gaussnewton.experiments.problems import problem

NAMES = ("curves", "mnist", "faces")
MEASURED = """
import sys
from pathlib import Path
import gaussnewton.experiments.problems as problems
from gaussnewton.experiments.data import Batches
def most():
    status = Path("/proc/self/status").read_text()
    return float(status.split("VmHWM:")[1].split()[0]) / 1024
before = most()
x, y = problems.problem(sys.argv[1]).data(Path(sys.argv[2]))
next(Batches(x, y, 1000, 0))
print(most() - before)
"""


def best(work: Callable[[], object], repeats: int = 20) -> float:
    """The least seconds of some repeats."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def row(name: str, folder: Path) -> list[str]:
    """One data set."""
    what = problem(name)
    x, y = what.data(folder)
    batches = Batches(x, y, 1000, 0)
    model, criterion = what.network(0), what.criterion()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, targets = next(batches)

    def update() -> None:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()

    gathered, updated = best(lambda: next(batches)), best(update)
    command = [sys.executable, "-c", MEASURED, name, str(folder)]
    memory = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [
        name.upper(), f"{len(x):,}", f"{1e3 * gathered:.2f}", f"{1e3 * updated:.1f}",
        f"{100 * gathered / updated:.2f} %", f"{memory:.0f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="MNIST's and Olivetti's files")
    output = Path(__file__).parent / "results" / "data.md"
    parser.add_argument("--output", type=Path, default=output)
    options = parser.parse_args()
    header = ["data", "images", "ms a batch", "ms an update of Adam", "share", "MiB at most"]
    rows = [row(name, options.data) for name in NAMES]
    table = tabulate(rows, header, tablefmt="github", disable_numparse=True)
    options.output.write_text(
        "# What training data cost\n\nWritten by `python benchmarks/data.py --data FOLDER`, whose "
        f"docstring says how it measures; {torch.get_num_threads()} threads.\n\n{table}\n"
    )
    print(table)


if __name__ == "__main__":
    main()
