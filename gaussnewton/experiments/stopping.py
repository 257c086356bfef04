"""Ctrl-C that waits for a good moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(Exception):  # noqa: N818
    """Somebody asked to stop, and it has stopped, with what there is saved where it can be."""


class Stop:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, *_: object) -> None:
        """Ask once; whoever asks again does not want to wait."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stopping() -> Iterator[Stop]:
    """Inside, Ctrl-C and a request to terminate only leave word; the second is meant at once.

    An update that is cut in the middle leaves parameters that are neither old nor new, so whoever
    trains asks between two updates. Only the main thread of a process can be told; elsewhere
    nothing changes.

    Example:
        >>> import signal
        >>> from gaussnewton.experiments.stopping import stopping
        >>> with stopping() as stop:
        ...     signal.raise_signal(signal.SIGINT)
        ...     stop.asked
        True
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[signal.Signals, Any] = {}

    def note(_: int, __: FrameType | None) -> None:
        stop.ask()

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
