"""What several commands take, and how they say it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from gaussnewton.experiments.config import DTYPES, Config, configure, with_threads_of
from gaussnewton.experiments.methods import METHODS
from gaussnewton.experiments.parsing import count, not_negative, positive, whole
from gaussnewton.experiments.problems import PROBLEMS, Data, problem
from gaussnewton.experiments.record import Folder
from gaussnewton.experiments.search import folder_name

T = TypeVar("T")
STOPPED = 130
"""The exit status of a command that was ended by Ctrl-C, by custom."""


def typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser of numbers as argparse wants it: its errors are shown to the user as they are."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def add_problem(parser: argparse.ArgumentParser) -> None:
    """The problem, by name."""
    parser.add_argument("problem", metavar="PROBLEM", help=", ".join(PROBLEMS))


def add_run_options(parser: argparse.ArgumentParser, budget: str) -> None:
    """What every run takes."""
    group = parser.add_argument_group("budget", budget)
    group.add_argument("--updates", type=typed(count), metavar="N", help="end after N updates")
    group.add_argument(
        "--seconds", type=typed(positive), metavar="S", help="end after S seconds in updates"
    )
    group = parser.add_argument_group("where")
    group.add_argument("--data", type=Path, metavar="FOLDER", help="where the data files are")
    group.add_argument(
        "--out",
        type=Path,
        default=Path("runs"),
        metavar="FOLDER",
        help="where runs are recorded (default: %(default)s)",
    )
    group = parser.add_argument_group("how")
    group.add_argument(
        "--seed", type=typed(whole), default=0, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--batch", type=typed(count), metavar="N", help="data in a batch (default: the paper's)"
    )
    group.add_argument("--dtype", choices=list(DTYPES), default="float32", help="default: float32")
    group.add_argument(
        "--threads",
        type=typed(count),
        metavar="N",
        help="of torch (default: its own choice, or that of the run that goes on)",
    )
    group.add_argument(
        "--save-every",
        type=typed(not_negative),
        default=60.0,
        metavar="S",
        help="seconds between checkpoints (default: %(default)g)",
    )


def config_of(options: argparse.Namespace, method_text: str, parent: Path) -> Config:
    """The configuration that the options ask for, for a run in a folder below a parent.

    Where a run goes on and no threads were asked for, they are those it had.
    """
    config = configure(
        options.problem,
        method_text,
        seed=options.seed,
        batch=options.batch,
        dtype=options.dtype,
        threads=options.threads,
        updates=options.updates,
        seconds=options.seconds,
    )
    saved = Folder(parent / folder_name(config)).saved_config()
    goes_on = saved is not None and options.threads is None
    return with_threads_of(config, saved) if goes_on and saved else config


def data_of(options: argparse.Namespace) -> Callable[[], Data]:
    """Reads the problem's data the first time that it is called."""
    read: Any = lru_cache(maxsize=1)(partial(problem(options.problem).data, options.data))
    return read


def problems_text() -> str:
    """The problems, for a help text."""
    rows = [f"  {each.name:<13}{each.title}: {each.architecture()}" for each in PROBLEMS.values()]
    return "\n".join(["problems:", *rows])


def methods_text() -> str:
    """The methods and their settings, for a help text."""
    rows: list[str] = []
    settings: dict[str, str] = {}
    for each in METHODS.values():
        rows.append(f"  {each.name:<13}{each.title}; {', '.join(each.settings)}")
        settings |= {key: value.meaning for key, value in each.settings.items()}
    said = [f"  {key:<13}{meaning}" for key, meaning in settings.items()]
    return "\n".join(["methods, and what can be set about them:", *rows, "", "settings:", *said])
