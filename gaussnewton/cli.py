"""The command ``gaussnewton``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import gaussnewton
from gaussnewton.demo import demo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="gaussnewton",
        description="Practical Gauss-Newton curvature and optimisation for PyTorch.",
    )
    parser.add_argument(
        "--version", action="version", version=f"gaussnewton {gaussnewton.__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    shown = commands.add_parser(
        "demo",
        help="train a small autoencoder of generated curves with gn.GaussNewton, "
        "beside Adam, and check its curvature",
    )
    shown.add_argument("--updates", type=_positive, default=100, help="default: %(default)s")
    shown.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args(arguments)
    demo(updates=options.updates, seed=options.seed)
    return 0


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return value
