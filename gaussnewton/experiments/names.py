"""Looking things up by a name that a person typed."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from gaussnewton.errors import ExperimentError

T = TypeVar("T")


def look_up(name: str, among: Mapping[str, T], what: str) -> T:
    """What has this name; an unknown name gets a sentence with the ones there are.

    Example:
        >>> from gaussnewton.experiments.names import look_up
        >>> look_up("kfrra", {"kfra": 1, "adam": 2}, "method")
        Traceback (most recent call last):
            ...
        gaussnewton.errors.ExperimentError: there is no method 'kfrra'; did you mean 'kfra'? ...
    """
    if name in among:
        return among[name]
    close = get_close_matches(name, among, n=1)
    guess = f" did you mean {close[0]!r}?" if close else ""
    there = f"There are {', '.join(among)}." if among else "There are none."
    raise ExperimentError(
        f"there is no {what} {name!r};{guess} {there}".replace("; There", ". There")
    )
