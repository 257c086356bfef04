"""Which settings ``gn.GaussNewton`` raced with: they may change between two races."""

from __future__ import annotations

import hashlib
from types import ModuleType
from typing import Any

import gaussnewton as gn
from gaussnewton import carrying, damping, looking, precision, scarcity, share

KEY = "defaults of gn.GaussNewton"
"""Under which they are kept beside versions of packages."""


RULES = (carrying, damping, looking, precision, scarcity, share)
"""Modules whose constants are as much a part of it as the settings are."""


def constants(module: ModuleType) -> dict[str, Any]:
    """The numbers that a module's rules have.

    >>> from gaussnewton import share
    >>> constants(share)["SHORTEST"]
    0.1
    """
    names = sorted(name for name in vars(module) if name.isupper())
    return {name: getattr(module, name) for name in names}


def fingerprint() -> str:
    """Eight digits that change with any of its settings, and of the constants of its rules.

    They do not change with a rule that keeps its constants.

    >>> len(fingerprint()), fingerprint() == fingerprint()
    (8, True)
    """
    settings = (gn.Damping(), gn.StepSize(), gn.Refresh(), gn.Guard())
    known = (settings, [constants(module) for module in RULES])
    return hashlib.sha256(repr(known).encode()).hexdigest()[:8]
