"""The command line of the race."""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gaussnewton.experiments.figures import save
from race import figure
from race.resident import stay_resident
from race.running import Budgets, Runs, missing, most_seconds
from race.settings import RUNNERS
from race.store import Store
from race.tables import report
from race.tasks import TASKS

HERE = Path(__file__).parent.parent


def parser() -> argparse.ArgumentParser:
    """What can be asked."""
    asked = argparse.ArgumentParser(prog="race.py", description="Seconds to target losses.")
    asked.add_argument("--data", type=Path, help="folder of MNIST's and Olivetti's files")
    asked.add_argument("--problems", nargs="+", choices=list(TASKS), default=list(TASKS))
    asked.add_argument("--runners", nargs="+", choices=list(RUNNERS), default=list(RUNNERS))
    asked.add_argument("--seeds", type=int, default=3, help="how many (default 3)")
    asked.add_argument("--first-seed", type=int, default=0, help="the first of them (default 0)")
    add = {"type": float, "metavar": "S"}
    asked.add_argument("--search-seconds", default=10.0, **add, help="a setting (default 10)")
    asked.add_argument("--seconds", default=60.0, **add, help="a contender (default 60)")
    asked.add_argument(
        "--long-seconds", default=600.0, **add, help="the best first-order peer (default 600)"
    )
    asked.add_argument("--slice", default=2.0, **add, help="the longest turn (default 2)")
    asked.add_argument("--threads", type=int, default=_cores(), help="default: all cores")
    asked.add_argument(
        "--stop-at-target", action="store_true", help="stop who has reached the last target"
    )
    asked.add_argument(
        "--give-up", type=float, default=math.inf, metavar="N",
        help="stop who has used N times our seconds to the last target (default: go on)",
    )  # fmt: skip
    asked.add_argument(
        "--leaders", type=int, default=1, metavar="N",
        help="the N best first-order peers go on to the long seconds (default 1)",
    )  # fmt: skip
    asked.add_argument(
        "--powers", type=int, nargs="+", default=[], help="only rates 2^P of the grids"
    )
    asked.add_argument(
        "--decays", type=float, nargs="+", default=[], help="only these decays of the grids"
    )
    asked.add_argument("--plan", action="store_true", help="say how long it takes, and do nothing")
    asked.add_argument("--report-only", action="store_true", help="from the raw results there are")
    asked.add_argument("--output", type=Path, default=HERE / "results" / "race.md")
    asked.add_argument("--figures", type=Path, default=HERE.parent / "docs" / "figures")
    return asked


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Race."""
    options = parser().parse_args(arguments)
    budgets = Budgets(
        options.search_seconds, options.seconds, options.long_seconds, options.slice,
        options.stop_at_target, options.threads, tuple(options.powers), tuple(options.decays),
        options.give_up, options.leaders,
    )  # fmt: skip
    runners = [runner for runner in options.runners if not missing(runner)]
    for runner in options.runners:
        if missing(runner):
            print(f"{runner} sits out: there is no {missing(runner)} (benchmarks/setup-race.sh)")
    search, racing = most_seconds(options.problems, runners, options.seeds, budgets)
    print(f"at most {search / 3600:.1f} h of search and {racing / 3600:.1f} h of race, and judging")
    if options.plan:
        return
    torch.set_num_threads(options.threads)
    stay_resident()
    store = Store(options.output.with_suffix(".jsonl"))
    if not options.report_only:
        _note(options, budgets, store)
        for name in options.problems:
            _race(name, runners, options, budgets, store)
    _write(options, store)
    print(options.output.read_text(encoding="utf-8"))


def _race(
    name: str, runners: list[str], options: argparse.Namespace, budgets: Budgets, store: Store
) -> None:
    started = time.time()

    def say(text: str) -> None:
        print(f"{time.time() - started:6.0f} s  {text}", flush=True)

    runs = Runs(name, options.data, say)
    try:
        settings = {}
        for runner in runners:
            try:
                settings[runner] = runs.chosen(runner, budgets, store)
            except (RuntimeError, ImportError) as error:  # one that cannot run stops no other
                say(f"{name}: {runner} sits out: {error}")
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            runs.race(settings, seed, budgets, store)
            _write(options, store)  # so that a long race shows what it has so far
    finally:
        runs.close()


def _note(options: argparse.Namespace, budgets: Budgets, store: Store) -> None:
    """Keep with the raw results what was asked."""
    facts = {
        "kind": "asked", "command": f"python benchmarks/race.py {_options_text(options)}",
        "search": budgets.search, "race": budgets.race, "long": budgets.long,
        "turn": budgets.turn, "threads": budgets.threads, "powers": list(budgets.powers),
        "decays": list(budgets.decays),
    }  # fmt: skip
    if store.find(kind="asked") != facts:
        store.add([facts])


def _write(options: argparse.Namespace, store: Store) -> None:
    """The table and the figure, of all problems that there are results of."""
    problems = {name: store.runs(name) for name in TASKS}
    problems = {name: runs for name, runs in problems.items() if runs}
    if not problems:
        sys.exit("there are no results yet")
    asked = [line for line in store.lines if line["kind"] == "asked"]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(report(problems, asked, _versions(store)), encoding="utf-8")
    seeds = sorted({len(lines) for runs in problems.values() for lines in runs.values()})
    many = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    threads = asked[-1]["threads"]
    budget = (
        f"median of {many} seed{'' if seeds[-1] == 1 else 's'}, bands from least to greatest; "
        f"{threads} thread{'' if threads == 1 else 's'}; interleaved"
    )
    result = figure.compute(problems, budget)
    save(result, figure.draw(result), options.figures, "race")
    for unneeded in ("svg", "json"):  # the raw results have all of it
        (options.figures / f"race.{unneeded}").unlink()


def _options_text(options: argparse.Namespace) -> str:
    """The command again, without what names a place."""
    words = ["--data FOLDER"]
    for name in ("problems", "runners"):
        if getattr(options, name) != parser().get_default(name):
            words.append(f"--{name} {' '.join(getattr(options, name))}")
    words += [f"--seeds {options.seeds}"]
    words += [f"--first-seed {options.first_seed}"] if options.first_seed else []
    words += [f"--search-seconds {options.search_seconds:g}"]
    words += [f"--seconds {options.seconds:g}", f"--long-seconds {options.long_seconds:g}"]
    words += [f"--threads {options.threads}"]
    words += [f"--give-up {options.give_up:g}"] if options.give_up < math.inf else []
    words += [f"--leaders {options.leaders}"] if options.leaders > 1 else []
    for name in ("powers", "decays"):
        if getattr(options, name):
            words.append(f"--{name} {' '.join(f'{each:g}' for each in getattr(options, name))}")
    return " ".join([*words, *(["--stop-at-target"] if options.stop_at_target else [])])


def _versions(store: Store) -> dict[str, str]:
    """What the numbers depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("gaussnewton", "pytorch-optimizer"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    for line in store.lines:
        found |= line.get("versions") or {}
    return found | {"processor": f"{platform.machine()}, {os.cpu_count()} CPUs"}
