"""Raw results: one JSON line a trial of the search, or a run of the race."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Store:
    """A file of JSON lines. Where several lines answer to one question, the last one counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = []
        if path.exists():
            self.lines = [_line(text) for text in path.read_text().splitlines()]
            self.lines = [line for line in self.lines if line]

    def add(self, lines: Sequence[Line]) -> None:
        """Write some lines at once, so that a group is there as a whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(_finite(line)) + "\n" for line in lines)
        if self.path.exists() and not (self.path.read_text() or "\n").endswith("\n"):
            text = "\n" + text  # the line before was cut off
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
        self.lines += [_finite(line) for line in lines]

    def find(self, **key: Any) -> Line | None:
        """The last line that has all of these."""
        return next((line for line in reversed(self.lines) if key.items() <= line.items()), None)

    def runs(self, problem: str) -> dict[str, dict[int, Line]]:
        """The last run of each runner and seed of a problem: by runner, then by seed."""
        found: dict[str, dict[int, Line]] = {}
        for line in self.lines:
            if line["kind"] == "race" and line["problem"] == problem:
                found.setdefault(line["runner"], {})[line["seed"]] = line
        return found


def _line(text: str) -> Line | None:
    """A line, or None if writing it was interrupted."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity: None stands for them."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
