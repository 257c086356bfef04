"""``gaussnewton search``: the best learning rate and decay of first-order methods."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from gaussnewton.errors import ExperimentError
from gaussnewton.experiments.budget import Budget
from gaussnewton.experiments.commands.options import (
    STOPPED,
    add_problem,
    add_run_options,
    config_of,
    data_of,
    problems_text,
    typed,
)
from gaussnewton.experiments.config import Config
from gaussnewton.experiments.live import Bar, Lines, duration, watcher
from gaussnewton.experiments.parsing import count, number, positive
from gaussnewton.experiments.problems import problem
from gaussnewton.experiments.record import Run
from gaussnewton.experiments.search import DECAYS, RATES, SEARCHED, grid, ranked, search
from gaussnewton.experiments.tables import ranking

T = TypeVar("T")

SUMMARY = "search for the best learning rate of first-order methods"
DESCRIPTION = """\
The paper's search: SGD, momentum, Nesterov and Adam, each with the rates 2^-6, 2^-7, … 2^-13 and
with the rate halved every 100, 50, 25, 12.5 or 6.25 % of the updates: 160 runs, each recorded in
a folder of its own below OUT/PROBLEM/search. Runs that diverge are ended and noted as such.
Ctrl-C stops it; the same command goes on from there. Started several times at once, the processes
share the work.
"""
EXAMPLES = """\
examples:
  gaussnewton search tiny --updates 200 --methods adam --decays 1
  gaussnewton search mnist --methods adam,nesterov --rates 2^-8,2^-9,2^-10 --data ~/mnist
"""


def listed(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Several of something, with commas between."""

    def parsed(text: str) -> list[T]:
        return [parse(part) for part in text.split(",")]

    return typed(parsed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    add_problem(parser)
    group = parser.add_argument_group("what is searched, each a list with commas between")
    group.add_argument(
        "--methods", type=listed(str), default=list(SEARCHED), help=f"default: {','.join(SEARCHED)}"
    )
    group.add_argument(
        "--rates",
        type=listed(positive),
        default=list(RATES),
        help="learning rates (default: 2^-6,2^-7,…,2^-13)",
    )
    group.add_argument(
        "--decays",
        type=listed(number),
        default=list(DECAYS),
        help="after what shares of the updates the rate is halved "
        f"(default: {','.join(f'{share:g}' for share in DECAYS)})",
    )
    group.add_argument(
        "--top", type=typed(count), default=10, metavar="N", help="so many are shown (default: 10)"
    )
    add_run_options(
        parser,
        "of each run; without either: as many updates as in the paper; --seconds only with "
        "--updates",
    )
    parser.epilog = f"{problems_text()}\n\n{EXAMPLES}"


def run(options: argparse.Namespace) -> int:
    """Search, and show the best."""
    if options.seconds and not options.updates:
        raise ExperimentError(
            "the periods after which rates are halved are shares of the updates of a run: "
            "with --seconds say --updates too."
        )
    options.updates = options.updates or problem(options.problem).first_order_updates
    parent = options.out / options.problem / "search"
    settings = grid(options.updates, options.methods, options.rates, options.decays)
    configs = [config_of(options, setting.text, parent) for setting in settings]
    first = ", whichever comes first" if options.seconds else ""
    budget = f"{Budget(options.updates, options.seconds).own}{first}"
    print(f"{len(configs)} runs of {budget}, below {parent}", flush=True)
    shown = watcher()
    results = list(
        search(
            numbered(configs, shown),
            parent,
            data=data_of(options),
            save_every=options.save_every,
            watcher=shown,
        )
    )
    print(f"\n{report(ranked(parent, configs), len(configs), options.top)}")
    if any(result.status == "stopped" for result in results):
        print("Stopped. The same command goes on from there.")
        return STOPPED
    return 0


def numbered(configs: list[Config], shown: Bar | Lines) -> Iterator[Config]:
    """The same, while what is shown says which one it is, and how long all will take."""
    began = time.monotonic()
    for place, config in enumerate(configs):
        shown.prefix = f"[{place + 1}/{len(configs)}] "
        if shown.ran:
            left = (time.monotonic() - began) / shown.ran * (len(configs) - place)
            shown.suffix = f"  (all: {duration(left)} left)"
        yield config


def report(runs: list[Run], asked: int, top: int) -> str:
    """What came out."""
    good = [run for run in runs if run.result and math.isfinite(run.result.score)]
    lines = [f"{len(runs)} of {asked} runs have ended, {len(runs) - len(good)} of them diverged."]
    if good:
        what = good[0].config.the_problem()
        lines += [f"The best by {what.shown}:", "", ranking(good, top)]
    return "\n".join(lines)
