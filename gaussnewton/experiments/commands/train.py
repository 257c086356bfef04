"""``gaussnewton train``: one problem by one method."""

from __future__ import annotations

import argparse

from gaussnewton.experiments.commands.options import (
    STOPPED,
    add_problem,
    add_run_options,
    config_of,
    data_of,
    methods_text,
    problems_text,
)
from gaussnewton.experiments.live import watcher
from gaussnewton.experiments.run import train
from gaussnewton.experiments.search import folder_name

SUMMARY = "train a network of the paper by one method"
DESCRIPTION = """\
Train a network of the paper by one method, and record the run in a folder of its own,
OUT/PROBLEM/METHOD: its configuration, a line of numbers for each update, and checkpoints. Ctrl-C
stops it after the present update; the same command goes on from there, and also after a crash,
bit for bit. A run that has come as far as asked is not repeated; otherwise it goes on.
"""
EXAMPLES = """\
examples:
  gaussnewton train tiny default
  gaussnewton train curves kfra-ma --updates 500
  gaussnewton train mnist adam:rate=2^-9,decay=5000 --seconds 600 --data ~/mnist
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    add_problem(parser)
    parser.add_argument(
        "method", metavar="METHOD", help="its name, or name:setting=value,setting=value; see below"
    )
    add_run_options(parser, "without either: as many updates as in the paper")
    parser.epilog = f"{problems_text()}\n\n{methods_text()}\n\n{EXAMPLES}"


def run(options: argparse.Namespace) -> int:
    """Train."""
    parent = options.out / options.problem
    config = config_of(options, options.method, parent)
    folder = parent / folder_name(config)
    problem = config.the_problem()
    print(f"{problem.title}, {problem.architecture()}\n{problem.shown}", flush=True)
    result = train(
        config, folder, data=data_of(options), save_every=options.save_every, watcher=watcher()
    )
    print(f"recorded in {folder}")
    if result.status != "stopped":
        return 0
    print("The same command goes on from there.")
    return STOPPED
