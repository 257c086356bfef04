"""``gaussnewton demo``: a first look."""

from __future__ import annotations

import argparse
from pathlib import Path

from gaussnewton.experiments.commands.options import STOPPED, typed
from gaussnewton.experiments.demo import demo
from gaussnewton.experiments.parsing import positive, whole
from gaussnewton.experiments.stopping import Stopped

SUMMARY = "a first look: one of the paper's networks by us and by Adam"
DESCRIPTION = """\
Train the paper's CURVES autoencoder by Adam and by gn.GaussNewton, check the curvature of a small
network against plain autograd, and make a page with the figure. It takes less than two minutes on
two cores, and needs no network. The images are generated.
"""
EXAMPLES = """\
example:
  gaussnewton demo --seconds 20
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    parser.add_argument(
        "--seconds",
        type=typed(positive),
        default=40.0,
        metavar="S",
        help="of updates by each method (default: %(default)g)",
    )
    parser.add_argument(
        "--seed", type=typed(whole), default=0, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-results"),
        metavar="FOLDER",
        help="for the figure and the page (default: %(default)s)",
    )
    parser.epilog = EXAMPLES


def run(options: argparse.Namespace) -> int:
    """Show it."""
    try:
        demo(options.seconds, options.seed, options.out)
    except Stopped as stopped:
        print(f"Stopped. {stopped}")
        return STOPPED
    return 0
