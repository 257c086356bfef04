"""``gaussnewton compare``: one problem by several methods, side by side."""

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
from gaussnewton.experiments.record import read_run
from gaussnewton.experiments.run import train
from gaussnewton.experiments.search import folder_name
from gaussnewton.experiments.tables import comparison

SUMMARY = "train a network by several methods, and show them side by side"
DESCRIPTION = """\
Train a network of the paper by several methods, one after the other, each recorded in a folder
of its own as by the command train, and print a table of their losses. All start from the same
network and see the same batches. Runs that have come as far as asked are not repeated, so a method
can be added later.
"""
EXAMPLES = """\
examples:
  gaussnewton compare tiny default kfra adam adam:rate=0.01 --updates 100
  gaussnewton compare mnist default adam --seconds 300 --data ~/mnist
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it takes."""
    add_problem(parser)
    parser.add_argument(
        "methods",
        metavar="METHOD",
        nargs="+",
        help="names, or name:setting=value,setting=value; see below",
    )
    add_run_options(parser, "of each run; without either: as many updates as in the paper")
    parser.epilog = f"{problems_text()}\n\n{methods_text()}\n\n{EXAMPLES}"


def run(options: argparse.Namespace) -> int:
    """Train by each, and show the table."""
    parent = options.out / options.problem
    configs = [config_of(options, text, parent) for text in options.methods]
    configs = list({config.method: config for config in configs}.values())
    data, shown, runs, stopped = data_of(options), watcher(), [], False
    for config in configs:
        folder = parent / folder_name(config)
        result = train(config, folder, data=data, save_every=options.save_every, watcher=shown)
        runs.append(read_run(folder).as_asked(config))
        stopped = result.status == "stopped"
        if stopped:
            break
    print(f"\n{comparison(runs)}\n\nrecorded below {parent}")
    if not stopped:
        return 0
    print("The same command goes on from there.")
    return STOPPED
