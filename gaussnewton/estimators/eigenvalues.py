"""Which eigenvalues a Kronecker block has."""

from __future__ import annotations

from typing import Literal

Eigenvalues = Literal["factored", "corrected"]
"""The products of the factors' eigenvalues, or, in the same eigenvectors, the exact diagonal."""


def check_eigenvalues(eigenvalues: str) -> None:
    """Refuse any other word."""
    if eigenvalues not in ("factored", "corrected"):
        raise ValueError(f"eigenvalues are 'factored' or 'corrected', not {eigenvalues!r}")
