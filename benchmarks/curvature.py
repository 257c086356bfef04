"""The cost of one batch's curvature, in units of that batch's forward + backward.

Compares gaussnewton with BackPACK and curvlinops. Everything about a problem is measured in
one run: rounds in which the forward + backward (the unit) and every contender each take one
turn, in a shuffled order, so that a slow moment of the machine touches all of them. What is
reported is the best turn of each and the ratio of the bests; the medians stand beside them.

Memory is that of one call in a fresh process: its peak resident memory less the peak that the
same process had reached after a forward + backward of the same batch.

Run it with ``benchmarks/setup.sh`` done once, from the repository's root::

    benchmarks/.venv/bin/python benchmarks/curvature.py

A library that is not installed is said to be so in the table.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor, nn

Factors = list[tuple[Tensor, Tensor]]
"""Per linear layer, in order: Q, the input's second moment, and G, the output side's factor."""

Run = Callable[[], Factors]

ENCODER = (784, 1000, 500, 250, 30)


@dataclass(frozen=True)
class Problem:
    """A network, a criterion and a batch."""

    sizes: tuple[int, ...]
    activation: type[nn.Module]
    criterion: type[nn.Module]
    batch: int
    target: str  # "class", "input" or "binary input"


CLASSIFIER = (*ENCODER, 10)
AUTOENCODER = (*ENCODER, *reversed(ENCODER[:-1]))

PROBLEMS = {
    "classifier": Problem(CLASSIFIER, nn.Tanh, nn.CrossEntropyLoss, 1000, "class"),
    "classifier-relu": Problem(CLASSIFIER, nn.ReLU, nn.CrossEntropyLoss, 1000, "class"),
    "autoencoder-mse": Problem(AUTOENCODER, nn.Tanh, nn.MSELoss, 50, "input"),
    "autoencoder-bce": Problem(AUTOENCODER, nn.Tanh, nn.BCEWithLogitsLoss, 50, "input"),
    "autoencoder-bce-binary": Problem(
        AUTOENCODER, nn.Tanh, nn.BCEWithLogitsLoss, 50, "binary input"
    ),
}


@dataclass
class Task:
    """A problem made concrete."""

    model: nn.Sequential
    criterion: nn.Module
    x: Tensor
    y: Tensor

    def linear_layers(self) -> dict[str, nn.Linear]:
        """The layers that have curvature, by module name."""
        modules = self.model.named_modules()
        return {name: module for name, module in modules if isinstance(module, nn.Linear)}


def make_model(problem: Problem) -> nn.Sequential:
    """Linear layers with the activation between them and none after the last."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(problem.sizes, problem.sizes[1:], strict=False):
        layers += [nn.Linear(fan_in, fan_out), problem.activation()]
    return nn.Sequential(*layers[:-1])


def make_target(problem: Problem, x: Tensor) -> Tensor:
    """The targets of a batch: random classes, the input itself, or the input rounded."""
    if problem.target == "class":
        return torch.randint(problem.sizes[-1], (problem.batch,))
    return x.round() if problem.target == "binary input" else x


def make_task(problem: Problem) -> Task:
    """The problem with the same weights and data each time."""
    torch.manual_seed(0)
    x = torch.rand(problem.batch, problem.sizes[0])
    return Task(make_model(problem), problem.criterion(), x, make_target(problem, x))


# --- What is measured -----------------------------------------------------------------------


def forward_backward(task: Task) -> Run:
    """The unit: one forward and one backward into fresh gradients."""

    def run() -> Factors:
        task.model.zero_grad()
        task.criterion(task.model(task.x), task.y).backward()
        return []

    return run


def gaussnewton_factors(task: Task, method: str) -> Run:
    """``gn.curvature`` of one batch."""
    import gaussnewton as gn

    names = list(task.linear_layers())

    def run() -> Factors:
        curvature = gn.curvature(task.model, task.criterion, (task.x, task.y), method=method)
        return [(curvature[name].Q, curvature[name].G) for name in names]

    return run


def backpack_factors(task: Task, method: str) -> Run:
    """BackPACK's extension, with the forward and backward that it needs."""
    import backpack
    from backpack import extensions

    extension = getattr(extensions, method.upper())
    model, criterion = backpack.extend(task.model), backpack.extend(task.criterion)
    weights = [layer.weight for layer in task.linear_layers().values()]

    def run() -> Factors:
        model.zero_grad()
        for parameter in model.parameters():
            vars(parameter).pop(method, None)  # nothing of an earlier run may pass for this one's
        loss = criterion(model(task.x), task.y)
        with backpack.backpack(extension()):
            loss.backward()
        factors = [getattr(weight, method) for weight in weights]
        return [(Q, G) for G, Q in factors]

    return run


def curvlinops_factors(task: Task, method: str) -> Run:
    """The Kronecker factors of curvlinops: its exact Fisher is KFLR, its Monte-Carlo one KFAC.

    The operator is made anew each time because computing the factors again adds to those it
    has. Told the number of data, it does not pass over them to count.
    """
    from curvlinops import FisherType, KFACLinearOperator

    fisher_type = {"kflr": FisherType.TYPE2, "kfac": FisherType.MC}[method]
    names, params = list(task.linear_layers()), list(task.model.parameters())

    def run() -> Factors:
        operator = KFACLinearOperator(
            task.model,
            task.criterion,
            params,
            [(task.x, task.y)],
            check_deterministic=False,
            fisher_type=fisher_type,
            mc_samples=1,
            num_data=len(task.x),
            num_per_example_loss_terms=1,
        )
        operator.compute_kronecker_factors()
        Q, G = operator._input_covariances, operator._gradient_covariances
        return [(Q[name], G[name]) for name in names]

    return run


@dataclass(frozen=True)
class Library:
    """A library, and what of it is measured."""

    package: str
    module: str
    methods: tuple[str, ...]
    factors: Callable[[Task, str], Run]


LIBRARIES = {
    "gaussnewton": Library(
        "gaussnewton", "gaussnewton", ("kflr", "kfra", "kfac"), gaussnewton_factors
    ),
    "BackPACK": Library(
        "backpack-for-pytorch", "backpack", ("kflr", "kfra", "kfac"), backpack_factors
    ),
    "curvlinops": Library(
        "curvlinops-for-pytorch", "curvlinops", ("kflr", "kfac"), curvlinops_factors
    ),
}


# --- How it is measured ---------------------------------------------------------------------


@dataclass
class Row:
    """A contender on a problem: what it did, or why it could not."""

    library: str
    method: str
    run: Run | None = None
    seconds: list[float] | None = None
    mebibytes: float | None = None
    trace: float | None = None
    note: str = ""


def short_reason(error: Exception) -> str:
    """The first line of an exception, without paths, to fit a table; if empty, who raised it."""
    text = re.sub(r"\s*\(?(/|[A-Z]:\\)[^\s)]+\)?", "", str(error).strip().split("\n")[0])
    raiser = traceback.extract_tb(error.__traceback__)[-1].name
    reason = f"{type(error).__name__}: {text or f'raised by {raiser}, without a message'}"
    return reason if len(reason) <= 110 else reason[:107] + "..."


def weight_trace(layers: list[nn.Linear], factors: Factors) -> float:
    """tr(Q ⊗ G) over the weights of all layers, after checking that the factors are all there.

    A library that keeps the bias as the last column of the weight has one more column in Q,
    which is left out here, so that libraries which agree show the same number.
    """
    total = 0.0
    for layer, (Q, G) in zip(layers, factors, strict=True):
        fan_out, fan_in = layer.weight.shape
        if G.shape != (fan_out, fan_out) or Q.shape not in ((fan_in,) * 2, (fan_in + 1,) * 2):
            raise ValueError(f"factors of {layer} are {tuple(Q.shape)} and {tuple(G.shape)}")
        part = (Q.diagonal()[:fan_in].sum() * G.trace()).item()
        if not 0 < part < float("inf"):
            raise ValueError(f"factors of {layer} have trace {part}")
        total += part
    return total


def prepare(problem: Problem, library: str, method: str) -> Row:
    """Build a contender on its own copy of the problem and run it once, checking the result."""
    row = Row(library, method)
    entry = LIBRARIES[library]
    task = make_task(problem)
    try:
        row.run = entry.factors(task, method)
        row.trace = weight_trace(list(task.linear_layers().values()), row.run())
    except ModuleNotFoundError as error:
        row.run, missing = None, error.name == entry.module
        row.note = "not installed" if missing else short_reason(error)
    except Exception as error:
        row.run, row.note = None, short_reason(error)
    return row


def seconds_of(run: Run) -> float:
    """The time of one call, the garbage of others collected before it."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
    finally:
        gc.enable()
    del result
    return seconds


def measure_times(rows: list[Row], repeats: int, budget: float) -> None:
    """Give each row its times, in rounds; a row that has used up its budget sits out."""
    running = [row for row in rows if row.run is not None]
    for row in running:
        row.seconds = []
    for turn in range(repeats):
        random.Random(turn).shuffle(running)
        for row in running:
            if row.run is not None and row.seconds is not None and sum(row.seconds) <= budget:
                row.seconds.append(seconds_of(row.run))


def peak_kibibytes() -> int:
    """The highest resident memory of this process since it began.

    Linux carries ``ru_maxrss`` over from the parent process; VmHWM is this program's own.
    """
    status = Path("/proc/self/status")
    if status.exists():
        match = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        if match:
            return int(match[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def extra_mebibytes(problem: Problem, library: str, method: str) -> float:
    """The peak memory of one call above that of a forward + backward; for a fresh process."""
    task = make_task(problem)
    run = LIBRARIES[library].factors(task, method)
    forward_backward(make_task(problem))()
    before = peak_kibibytes()
    run()
    return (peak_kibibytes() - before) / 1024


def measure_memory(name: str, row: Row) -> None:
    """Give a row its memory, from a process of its own."""
    command = [sys.executable, __file__, "--memory-of", name, row.library, row.method]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        row.mebibytes = float(answer.stdout)
    else:
        row.note = "memory: " + answer.stderr.strip().split("\n")[-1][:90]


def measure(name: str, repeats: int, budget: float, memory: bool) -> list[Row]:
    """All rows of a problem, the unit first."""
    problem = PROBLEMS[name]
    unit = Row("torch", "forward + backward", forward_backward(make_task(problem)))
    seconds_of(unit.run)
    pairs = [(library, method) for library in LIBRARIES for method in LIBRARIES[library].methods]
    rows = [unit, *(prepare(problem, library, method) for library, method in pairs)]
    measure_times(rows, repeats, budget)
    if memory:
        for row in rows[1:]:
            if row.run is not None:
                measure_memory(name, row)
    return rows


# --- What is written ------------------------------------------------------------------------


def version_of(library: Library) -> str:
    """An installed library's version, or that it is there without one, or not there."""
    try:
        return importlib.metadata.version(library.package)
    except importlib.metadata.PackageNotFoundError:
        found = importlib.util.find_spec(library.module) is not None
        return "from source" if found else "not installed"


def environment(arguments: argparse.Namespace) -> dict[str, str | int]:
    """What the numbers depend on."""
    options = f"--repeats {arguments.repeats} --budget {arguments.budget:g}"
    options += "" if arguments.memory else " --no-memory"
    return {
        "command": f"python benchmarks/curvature.py --problems {' '.join(arguments.problems)} "
        + options,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version_of(library) for name, library in LIBRARIES.items()},
        "processor": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "torch threads": torch.get_num_threads(),
    }


def record(row: Row, unit: Row) -> dict[str, object]:
    """A row as plain numbers, with its ratios to the unit."""
    numbers: dict[str, object] = {"library": row.library, "method": row.method, "note": row.note}
    if row.seconds and unit.seconds:
        best, median = min(row.seconds), statistics.median(row.seconds)
        numbers |= {
            "best_ms": 1e3 * best,
            "median_ms": 1e3 * median,
            "units": best / min(unit.seconds),
            "median_units": median / statistics.median(unit.seconds),
            "peak_mib": row.mebibytes,
            "trace": row.trace,
            "seconds": row.seconds,
        }
    return numbers


COLUMNS = {
    "library": None,
    "method": None,
    "runs": "d",
    "best_ms": ".1f",
    "units": ".2f",
    "median_ms": ".1f",
    "median_units": ".2f",
    "peak_mib": ".0f",
    "trace": ".5g",
    "note": None,
}


def cells(numbers: dict[str, object]) -> list[str]:
    """One table line."""
    seconds = numbers.get("seconds")
    shown = {**numbers, "runs": len(seconds) if isinstance(seconds, list) else None}
    values = ((shown.get(name), form) for name, form in COLUMNS.items())
    return ["" if value is None else format(value, form or "") for value, form in values]


def describe(problem: Problem) -> str:
    """A problem in one line."""
    layers = "-".join(map(str, problem.sizes))
    return (
        f"{layers}, {problem.activation.__name__}, {problem.criterion.__name__} (mean), "
        f"batch {problem.batch}, target: {problem.target}."
    )


def markdown(facts: dict[str, str | int], results: dict[str, list[dict[str, object]]]) -> str:
    """The report."""
    parts = [
        "# Curvature of one batch",
        "Written by `benchmarks/curvature.py`, whose docstring says how it measures. One *unit* "
        "is the forward + backward of the same batch, measured in the same rounds: the first "
        "line of each table. `units` is the ratio of the best times, `median_units` that of the "
        "medians, `peak_mib` the memory above a forward + backward, `trace` the trace of all "
        "weight blocks, which libraries that compute the same thing share (KFAC is random).",
        "\n".join(f"- {name}: `{value}`" for name, value in facts.items()),
    ]
    headers = [name.replace("_", " ") for name in COLUMNS]
    align = ["left" if form is None else "right" for form in COLUMNS.values()]
    for name, rows in results.items():
        table = tabulate(
            [cells(row) for row in rows],
            headers,
            tablefmt="github",
            colalign=align,
            disable_numparse=True,
        )
        parts += [f"## {name}", describe(PROBLEMS[name]), table]
    return "\n\n".join(parts) + "\n"


def write(output: Path, facts: dict[str, str | int], results: dict[str, list]) -> None:
    """The Markdown report, and beside it the raw numbers as JSON."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(markdown(facts, results), encoding="utf-8")
    raw = json.dumps({"environment": facts, "problems": results}, indent=1)
    output.with_suffix(".json").write_text(raw + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--repeats", type=int, default=15, help="rounds (default 15)")
    parser.add_argument(
        "--budget",
        type=float,
        default=30.0,
        help="seconds after which a slow method sits out the remaining rounds (default 30)",
    )
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/curvature.md"))
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    if arguments.memory_of:
        name, library, method = arguments.memory_of
        print(extra_mebibytes(PROBLEMS[name], library, method))
        return
    facts = environment(arguments)
    results = {}
    for name in arguments.problems:
        rows = measure(name, arguments.repeats, arguments.budget, arguments.memory)
        results[name] = [record(row, rows[0]) for row in rows]
        write(arguments.output, facts, results)  # so that a long run shows what it has so far
    print(arguments.output.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
