"""Seconds that a contender had: those of the clock, less what the machine gave to somebody else.

It imports nothing but the standard library, since ``jax_child.py`` uses it too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

STATISTICS = Path("/proc/stat")
STEAL = 8
"""The column of ``/proc/stat`` with the ticks that a virtual processor waited for a real one."""

MOST = 0.999
"""The share of a lap that may be taken away: ticks are coarse, and no work takes no time."""


class Lap:
    """Measures from when it is made.

    On a shared machine a hypervisor may stop a virtual processor for many seconds, in the turn of
    whoever comes to have it. Linux tells for each of them how long; all processors work together,
    so that the longest stop of one is what all of them waited.
    """

    def __init__(self) -> None:
        self._stolen = stolen()
        self._begun = time.perf_counter()

    def seconds(self) -> float:
        """What has passed less what was taken away, as far as the system tells."""
        passed = time.perf_counter() - self._begun
        taken = [after - before for before, after in zip(self._stolen, stolen(), strict=True)]
        return passed - min(max(taken, default=0.0), MOST * passed)


def stolen(statistics: Path = STATISTICS) -> list[float]:
    """Seconds for which each processor was taken away so far; none where the system is silent."""
    try:
        lines = statistics.read_text().splitlines()
        tick = 1.0 / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):  # not Linux
        return []
    rows = [line.split() for line in lines if line.startswith("cpu") and line[3].isdigit()]
    return [int(row[STEAL]) * tick for row in rows if len(row) > STEAL]
