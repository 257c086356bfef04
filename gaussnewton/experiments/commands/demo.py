"""``gaussnewton demo``: a first look."""

from __future__ import annotations

import argparse

from gaussnewton.demo import demo
from gaussnewton.experiments.commands.options import typed
from gaussnewton.experiments.parsing import count

SUMMARY = "train a small autoencoder beside Adam, and check its curvature"
DESCRIPTION = """\
Train a small autoencoder of generated curves with gn.GaussNewton, beside Adam, and check its
curvature against plain autograd. It takes some seconds, and needs and writes no files.
"""
EXAMPLES = """\
example:
  gaussnewton demo --updates 50
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    parser.add_argument(
        "--updates", type=typed(count), default=100, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.epilog = EXAMPLES


def run(options: argparse.Namespace) -> int:
    """Show it."""
    demo(updates=options.updates, seed=options.seed)
    return 0
