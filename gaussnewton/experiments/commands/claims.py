"""``gaussnewton claims``: what the paper claims, checked within a budget."""

from __future__ import annotations

import argparse

from gaussnewton.experiments.budget import Budget
from gaussnewton.experiments.claims import DATA_SETS
from gaussnewton.experiments.commands.options import STOPPED, typed
from gaussnewton.experiments.commands.report import show
from gaussnewton.experiments.commands.reproduce import add_place, make
from gaussnewton.experiments.extra import require
from gaussnewton.experiments.figures import FIGURES
from gaussnewton.experiments.lineup import RATES, entries
from gaussnewton.experiments.live import duration, watcher
from gaussnewton.experiments.parsing import positive
from gaussnewton.experiments.reproduction import Reproduction

SUMMARY = "check the paper's claims in an hour, or in the time you give"
DESCRIPTION = """\
Divide a time among all that the paper's claims are about (three autoencoders, the mixture and
alignment, by every method), run it, and print each claim with a verdict from the numbers that
were measured; the figures and a page are saved too. Ctrl-C stops it; the same command goes on
from there. Numbers of a short time are of the beginning of training, which the figures say.
"""
EXAMPLES = """\
examples:
  gaussnewton claims --data ~/files
  gaussnewton claims --seconds 14400 --out results-4h
"""

HOUR = 3600.0
OVERHEAD = 1.4
"""Evaluating, saving and reading data take about two fifths of the time of updates."""

ALIGNED = 0.15
"""The share of alignment."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    parser.add_argument(
        "--seconds",
        type=typed(positive),
        default=HOUR,
        metavar="S",
        help="about so long in all (default: %(default)g)",
    )
    add_place(parser)
    parser.epilog = EXAMPLES


def shares(seconds: float) -> tuple[float, float]:
    """What one method gets, and what the alignment of one data set gets, in seconds.

    Example:
        >>> from gaussnewton.experiments.commands.claims import shares
        >>> [round(share) for share in shares(3600.0)]
        [62, 180]
    """
    return (1 - ALIGNED) * seconds / (OVERHEAD * _runs()), ALIGNED * seconds / len(DATA_SETS)


def _runs() -> int:
    """How many there are in all. Adam has one at 1e-3 and one at each other rate."""
    return sum(len(entries(name)) + 1 + len(RATES) for name in (*DATA_SETS, "mixture"))


def run(options: argparse.Namespace) -> int:
    """Measure, and judge."""
    for module in ("matplotlib", "jinja2"):
        require(module, "the report")  # before an hour of training
    each, aligned = (float(f"{share:.3g}") for share in shares(options.seconds))
    print(
        f"About {duration(options.seconds)}: {each:g} s of updates for every method on every "
        f"problem, for Adam at each of {1 + len(RATES)} rates ({_runs()} runs, about {OVERHEAD:g} "
        f"times as long with evaluations), and about {aligned:g} s for every alignment. "
        "What is there already is not run again.",
        flush=True,
    )
    common = {"data": options.data, "seed": options.seed, "threads": options.threads}
    runs = Reproduction(options.out, Budget(seconds=each), watcher=watcher(), **common)
    steps = Reproduction(options.out, Budget(seconds=aligned), watcher=watcher(), **common)
    others = [name for name in FIGURES if name != "alignment"]
    for maker, names in ((runs, others), (steps, ["alignment"])):
        if not make(maker, names, options.typed):
            return STOPPED
    show(options.out)
    return 0
