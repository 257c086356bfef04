"""``gaussnewton reproduce``: the paper's figures."""

from __future__ import annotations

import argparse
from pathlib import Path

from gaussnewton.experiments.budget import Budget
from gaussnewton.experiments.claims import DATA_SETS
from gaussnewton.experiments.commands.options import STOPPED, typed
from gaussnewton.experiments.commands.search import listed
from gaussnewton.experiments.extra import require
from gaussnewton.experiments.figures import FIGURES
from gaussnewton.experiments.live import watcher
from gaussnewton.experiments.names import look_up
from gaussnewton.experiments.parsing import count, positive, whole
from gaussnewton.experiments.problems import problem
from gaussnewton.experiments.reproduction import SEARCHES, Reproduction
from gaussnewton.experiments.stopping import Stopped

SUMMARY = "make the paper's figures"
DESCRIPTION = """\
Train what a figure of the paper needs, and draw it: OUT/FIGURE.json, .svg and .png. Runs are
recorded below OUT/runs and are not repeated; alignment is recorded there too, point by point.
Ctrl-C stops after the present update; the same command goes on from there.

Without a budget it is the paper's: 5,000 updates with curvature and 40,000 without, four times as
many on FACES, which takes days. The figure says what its budget was. The figure "cpu" shows the
runs of the three autoencoders again, by seconds.

Tuned Adam is the best of four rates and of all settings that were searched with as large a budget,
by --search here or by "gaussnewton search", which records its runs below "runs" unless it is told
another --out: name that with --searches. The figure says how many of the paper's grid there were.
"""
EXAMPLES = """\
examples:
  gaussnewton reproduce surface rank
  gaussnewton reproduce curves --seconds 60
  gaussnewton reproduce all --updates 500 --data ~/files
  gaussnewton reproduce alignment --problem tiny --updates 20
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    parser.add_argument(
        "figures", metavar="FIGURE", nargs="+", help=f"{', '.join(FIGURES)}; or all"
    )
    group = parser.add_argument_group(
        "budget", "of each method; for alignment, of each data set; without either: the paper's"
    )
    group.add_argument("--updates", type=typed(count), metavar="N", help="end after N updates")
    group.add_argument("--seconds", type=typed(positive), metavar="S", help="end after S seconds")
    group.add_argument(
        "--search",
        action="store_true",
        help="run the paper's grid of 40 settings of Adam, each with this budget",
    )
    group.add_argument(
        "--searches",
        type=Path,
        default=SEARCHES,
        metavar="FOLDER",
        help="the --out of gaussnewton search: its runs are used too (default: %(default)s)",
    )
    add_place(parser)
    parser.add_argument_group("alignment").add_argument(
        "--problem",
        type=listed(str),
        default=list(DATA_SETS),
        metavar="NAMES",
        help=f"which, with commas between (default: {','.join(DATA_SETS)}; tiny is to try)",
    )
    parser.epilog = f"{figures_text()}\n\n{EXAMPLES}"


def add_place(parser: argparse.ArgumentParser) -> None:
    """Where data and results are, and how runs are run."""
    group = parser.add_argument_group("where and how")
    group.add_argument("--data", type=Path, metavar="FOLDER", help="where the data files are")
    group.add_argument(
        "--out",
        type=Path,
        default=Path("results"),
        metavar="FOLDER",
        help="for figures and runs (default: %(default)s)",
    )
    group.add_argument(
        "--threads",
        type=typed(count),
        metavar="N",
        help="of torch (default: its own choice, or that of the run that goes on)",
    )
    group.add_argument(
        "--seed", type=typed(whole), default=0, metavar="N", help="default: %(default)s"
    )


def run(options: argparse.Namespace) -> int:
    """Make the figures."""
    names = list(dict.fromkeys(options.figures))
    names = list(FIGURES) if "all" in names else names
    for name in names:
        look_up(name, FIGURES, "figure")
    for name in options.problem:
        problem(name)
    require("matplotlib", "drawing figures")  # before hours of training
    made = Reproduction(
        options.out,
        Budget(options.updates, options.seconds),
        data=options.data,
        seed=options.seed,
        threads=options.threads,
        search=options.search,
        searches=options.searches,
        aligned=options.problem,
        watcher=watcher(),
    )
    return 0 if make(made, names, options.typed) else STOPPED


def make(reproduction: Reproduction, names: list[str], again: str) -> bool:
    """Make figures one after the other, and say where they are; returns whether it came to an end.

    Args:
        reproduction: makes them.
        names: of the figures.
        again: what to type to go on.
    """
    for name in names:
        try:
            paths = reproduction.make(name)
        except Stopped:
            print(f"Stopped; everything so far is saved. To go on: {again}")
            return False
        for path in paths:
            print(f"{name}: {path} (and .svg, .json)", flush=True)
    return True


def figures_text() -> str:
    """The figures, for a help text."""
    rows = [f"  {kind.name:<11}{kind.title} ({kind.where})" for kind in FIGURES.values()]
    return "\n".join(["figures:", *rows])
