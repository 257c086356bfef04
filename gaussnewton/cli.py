"""The command ``gaussnewton``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

import gaussnewton
from gaussnewton.errors import GaussNewtonError
from gaussnewton.experiments.commands import COMMANDS, command

DESCRIPTION = """\
Gauss-Newton optimisation and curvature for PyTorch, and the experiments of the paper it comes
from, Practical Gauss-Newton Optimisation for Deep Learning (Botev, Ritter, Barber, 2017).
"""
EPILOG = """\
examples:
  gaussnewton demo                                  a first look, in two minutes
  gaussnewton train tiny default                    train a small network, recorded in runs/
  gaussnewton compare tiny default adam --updates 100
  gaussnewton train mnist kfra --data ~/mnist       the paper's MNIST autoencoder
  gaussnewton reproduce curves --seconds 60         a figure of the paper, on a budget
  gaussnewton claims --data ~/files                 the paper's claims, checked in an hour
  gaussnewton COMMAND --help                        all about a command

environment:
  GAUSSNEWTON_DATA   the folder with the files of MNIST (train-images-idx3-ubyte.gz,
                     train-labels-idx1-ubyte.gz) and FACES (olivettifaces.mat), if --data does
                     not name one. Without either they are downloaded once and cached. CURVES are
                     generated.

exit status:
  0 if all went well, 2 if something that was asked for cannot be done, 130 after Ctrl-C
"""
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage of everything."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        self.exit(2, f"{self.prog}: error: {message}. See {self.prog} --help.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    # What to type to go on with what was stopped.
    options.typed = shlex.join(["gaussnewton", *(sys.argv[1:] if arguments is None else arguments)])
    name = f"gaussnewton {options.command}"
    try:
        return command(options.command).run(options)
    except BrokenPipeError:
        # Whoever read the output has gone; Python's own flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (GaussNewtonError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> Parser:
    parser = Parser(
        prog="gaussnewton",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-V", "--version", action="version", version=f"gaussnewton {gaussnewton.__version__}"
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, title="commands"
    )
    for name in COMMANDS:
        each = command(name)
        added = commands.add_parser(
            name,
            help=each.SUMMARY,
            description=each.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        each.add_arguments(added)
    return parser
