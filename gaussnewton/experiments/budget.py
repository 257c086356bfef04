"""How much a method gets in a figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gaussnewton.experiments.problems import Problem


@dataclass(frozen=True)
class Budget:
    """So many updates, or so many seconds in updates; neither: as many updates as in the paper.

    Example:
        >>> from gaussnewton.experiments.budget import Budget
        >>> from gaussnewton.experiments.problems import problem
        >>> Budget(seconds=60.0).text(problem("mnist"))
        '60 s of updates a method (full size: 5,000 updates with curvature, 40,000 without)'
        >>> Budget().text(problem("mnist"))
        'full size: 5,000 updates with curvature, 40,000 without'
    """

    updates: int | None = None
    seconds: float | None = None

    @property
    def full(self) -> bool:
        """Whether it is the paper's."""
        return self.updates is None and self.seconds is None

    @property
    def own(self) -> str:
        """In words; nothing for the paper's."""
        parts = [f"{self.updates:,} updates" if self.updates else ""]
        parts += [f"{self.seconds:g} s" if self.seconds else ""]
        return " or ".join(part for part in parts if part)

    def text(self, problem: Problem | None = None) -> str:
        """For a figure of runs of a problem, or of several."""
        own = f"{self.own}{' of updates' if self.seconds else ''}" if self.own else ""
        if problem is None:
            return f"{own} a method" if own else "full size"
        full = (
            f"full size: {problem.second_order_updates:,} updates with curvature, "
            f"{problem.first_order_updates:,} without"
        )
        return f"{own} a method ({full})" if own else full

    def points(self, points: list[list[Any]]) -> list[list[Any]]:
        """Those of a run that lie within it."""
        return [
            point
            for point in points
            if (self.updates is None or point[0] <= self.updates)
            and (self.seconds is None or point[1] <= self.seconds)
        ]
