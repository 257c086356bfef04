"""The commands of ``gaussnewton``, one file each.

A command is a module with ``SUMMARY``, ``DESCRIPTION`` and ``EXAMPLES`` for its help,
``add_arguments(parser)``, and ``run(options)``, which returns the exit status. Its name is the
module's. Registering it is a name in :data:`COMMANDS`. Packages of the extra ``experiments`` are
imported only when they are used, so that the other commands work without it.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Protocol, cast, runtime_checkable

COMMANDS = ("demo", "reproduce", "report", "claims", "train", "compare", "search")
"""In the order of the help."""


@runtime_checkable
class Command(Protocol):
    """What a command's module has."""

    SUMMARY: str
    DESCRIPTION: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Say what it takes."""

    def run(self, options: argparse.Namespace) -> int:
        """Do it; returns the exit status."""


def command(name: str) -> Command:
    """A command by its name."""
    return cast(Command, import_module(f"{__name__}.{name}"))
