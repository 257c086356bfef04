"""Packages that only the experiments need."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from gaussnewton.errors import MissingExtraError


def require(module: str, purpose: str) -> ModuleType:
    """Import a module of the extra ``experiments``, or say how to install it.

    Example:
        >>> from gaussnewton.experiments.extra import require
        >>> require("absent", "an example")
        Traceback (most recent call last):
            ...
        gaussnewton.errors.MissingExtraError: absent is not installed, which an example needs. ...
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module} is not installed, which {purpose} needs. "
            'Install it with: pip install "gaussnewton[experiments]"'
        ) from error
