"""``gaussnewton report``: all results on one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from textwrap import fill

from tabulate import tabulate

from gaussnewton.experiments.report import Judged, judged_report

SUMMARY = "put all results on one page, with the paper's claims and whether they held"
DESCRIPTION = """\
Write FOLDER/index.html, a page that needs nothing else, of all the figures in a folder, and print
what the paper claims and whether it held there.
"""
EXAMPLES = """\
example:
  gaussnewton report results
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        type=Path,
        default=Path("results"),
        help="where figures were saved (default: %(default)s)",
    )
    parser.epilog = EXAMPLES


def run(options: argparse.Namespace) -> int:
    """Write the page, and show the verdicts."""
    show(options.folder)
    return 0


def show(folder: Path) -> None:
    """Write the page, and print the verdicts and where the page is."""
    page, judged = judged_report(folder)
    print(f"{verdicts(judged)}\n\n{page}")


def verdicts(judged: list[Judged]) -> str:
    """Each claim, what was found of it, and the numbers, as a table."""
    rows = [
        [fill(claim.statement, 32), verdict.outcome, fill(verdict.sentence, 50)]
        for claim, verdict in judged
    ]
    found = [verdict.outcome for _, verdict in judged]
    counts = ", ".join(f"{found.count(o)} {o}" for o in ("held", "not held", "not measured"))
    heads = ["the paper claims", "here", "measured"]
    return f"{tabulate(rows, heads, tablefmt='simple_grid')}\n{counts}"
