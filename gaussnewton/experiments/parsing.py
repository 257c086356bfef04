"""Numbers as people type them."""

from __future__ import annotations

import math

MOST = 2**63 - 1
"""What torch can take for a seed, and more of anything than can be done."""


def number(text: str) -> float:
    """A finite number; a power may be written with ``^``.

    Example:
        >>> from gaussnewton.experiments.parsing import number
        >>> number("1e-3"), number("2^-6")
        (0.001, 0.015625)
    """
    base, power, exponent = text.partition("^")
    try:
        value = float(base) ** float(exponent) if power else float(text)
    except (ValueError, ArithmeticError):
        value = math.nan
    if isinstance(value, complex) or not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number")
    return value


def positive(text: str) -> float:
    """A number above zero."""
    value = number(text)
    if value <= 0:
        raise ValueError(f"{text!r} is not above zero")
    return value


def not_negative(text: str) -> float:
    """A number that is zero or more."""
    value = number(text)
    if value < 0:
        raise ValueError(f"{text!r} is negative")
    return value


def whole(text: str) -> int:
    """A whole number, zero or more."""
    return _whole(text, 0, ", zero or more")


def count(text: str) -> int:
    """A whole number above zero."""
    return _whole(text, 1, " above zero")


def _whole(text: str, least: int, said: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < least:
        raise ValueError(f"{text!r} is not a whole number{said}")
    if value > MOST:
        raise ValueError(f"{text!r} is not below 2^63")
    return value


def yes_or_no(text: str) -> bool:
    """A switch."""
    if text not in ("yes", "no"):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text == "yes"
