"""How long the phases of a step take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


class Stopwatch:
    """Seconds by phase, read only when somebody asks; ``torch.profiler`` shows the phases too.

    On a GPU, work is timed by events in its own stream, so that nothing waits for it; the
    wait is where :meth:`seconds` is called.

    Args:
        device: where the work is done.

    Example:
        >>> import torch
        >>> from gaussnewton.timing import Stopwatch
        >>> watch = Stopwatch(torch.device("cpu"))
        >>> with watch("curvature"):
        ...     _ = torch.eye(3).inverse()
        >>> list(watch.seconds())
        ['curvature']
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: list[tuple[str, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time what is inside, and add it to a phase."""
        start = self._now()
        with record_function(f"gaussnewton: {phase}"):
            try:
                yield
            finally:
                self._spans.append((phase, start, self._now()))

    def seconds(self) -> dict[str, float]:
        """Each phase's seconds so far."""
        result: dict[str, float] = {}
        for phase, start, end in self._spans:
            result[phase] = result.get(phase, 0.0) + _between(start, end)
        return result

    def _now(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return start.elapsed_time(end) / 1000
    assert not isinstance(end, torch.cuda.Event)
    return end - start
