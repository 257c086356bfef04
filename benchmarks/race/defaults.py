"""Which settings ``gn.GaussNewton`` raced with: they may change between two races."""

from __future__ import annotations

import hashlib

import gaussnewton as gn
from gaussnewton.damping import FIRST_MULTIPLES

KEY = "defaults of gn.GaussNewton"
"""Under which they are kept beside versions of packages."""


def fingerprint() -> str:
    """Eight digits that change with any of the settings that it has by itself.

    >>> len(fingerprint()), fingerprint() == fingerprint()
    (8, True)
    """
    settings = (gn.Damping(), gn.StepSize(), gn.Refresh(), gn.Guard(), FIRST_MULTIPLES)
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:8]
