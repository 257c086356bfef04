"""Keeping a process in memory while it waits for its turn.

It imports nothing but the standard library, since ``jax_child.py`` uses it too.
"""

from __future__ import annotations

import ctypes

CURRENT, FUTURE, ON_FAULT = 1, 2, 4
"""Of Linux's ``mlockall``: pages that are there, pages to come, and no page before it is used."""


def stay_resident() -> bool:
    """Lock every page once it is in use; returns whether the system lets us.

    Some systems take away what was idle for a while, code included. A contender that sat out
    would then read it from disk again, in its own seconds.
    """
    try:
        lock = ctypes.CDLL(None, use_errno=True).mlockall
    except (OSError, AttributeError, TypeError):  # not Linux
        return False
    return bool(lock(CURRENT | FUTURE | ON_FAULT) == 0)
