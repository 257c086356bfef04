"""What a run is asked to do."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from gaussnewton.errors import ExperimentError
from gaussnewton.experiments.methods import Method, method
from gaussnewton.experiments.parsing import MOST
from gaussnewton.experiments.problems import Problem, problem

MOST_THREADS = 4096
"""More than that is a slip, which torch would try to obey."""

DTYPES = {"float32": torch.float32, "float64": torch.float64}
FORMAT = 1
"""Of the files in a run's folder."""

BUDGET = ("updates", "seconds")


@dataclass(frozen=True)
class Config:
    """All that determines a run, as plain values. Make it with :func:`configure`.

    Attributes:
        problem: by name.
        method: as on the command line, in its standard spelling.
        seed: of the network, of the batches, and of methods that draw random numbers.
        batch: data in a batch.
        dtype: "float32" or "float64".
        threads: of torch; sums come out differently in the last bit with another number.
        updates: the run ends after so many; None for no such end.
        seconds: the run ends after so many seconds in updates; None for no such end.
        format: of the files.
    """

    problem: str
    method: str
    seed: int = 0
    batch: int = 1000
    dtype: str = "float32"
    threads: int = 1
    updates: int | None = None
    seconds: float | None = None
    format: int = FORMAT

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str) -> Config:
        """The configuration that was saved somewhere."""
        if values.get("format") != FORMAT or set(values) != {each.name for each in fields(cls)}:
            raise ExperimentError(
                f"{where} is not the configuration of a run of this version (format {FORMAT})."
            )
        return cls(**values)

    def the_problem(self) -> Problem:
        """The problem itself."""
        return problem(self.problem)

    def the_method(self) -> Method:
        """The method itself."""
        return method(self.method)

    def spent(self, update: int, seconds: float) -> bool:
        """Whether the budget is."""
        return self.progress(update, seconds) >= 1

    def progress(self, update: int, seconds: float) -> float:
        """How much of the budget is spent, from 0 to 1."""
        return min(
            1.0,
            max(
                update / self.updates if self.updates else 0.0,
                seconds / self.seconds if self.seconds else 0.0,
            ),
        )

    def same_budget(self, other: Config) -> bool:
        """Whether another ends where this one does."""
        return all(getattr(self, key) == getattr(other, key) for key in BUDGET)

    def differences(self, other: Config) -> list[str]:
        """In what this run is another one than a saved one; the budget is not part of it."""
        mine, theirs = self.as_dict(), other.as_dict()
        return [
            f"{key} {theirs[key]} instead of {mine[key]}"
            for key in mine
            if key not in BUDGET and mine[key] != theirs[key]
        ]


def configure(
    problem_name: str,
    method_text: str,
    *,
    seed: int = 0,
    batch: int | None = None,
    dtype: str = "float32",
    threads: int | None = None,
    updates: int | None = None,
    seconds: float | None = None,
) -> Config:
    """A run's configuration, checked and with its defaults filled in.

    Args:
        problem_name: a name of :data:`~gaussnewton.experiments.problems.PROBLEMS`.
        method_text: as for :func:`~gaussnewton.experiments.methods.method`.
        seed: zero or more, below 2^63.
        batch: by default the problem's.
        dtype: "float32" or "float64".
        threads: by default as many as torch uses now; at most 4096.
        updates: by default, if ``seconds`` is not given either, as many as in the paper.
        seconds: no limit by default.

    Raises:
        ExperimentError: if there is no such problem or method, or a number makes no sense.

    Example:
        >>> from gaussnewton.experiments.config import configure
        >>> configure("mnist", "kfra").updates, configure("mnist", "adam").updates
        (5000, 40000)
        >>> configure("mnist", "adam", seconds=60.0).updates is None
        True
    """
    what, how = problem(problem_name), method(method_text)
    if updates is None and seconds is None:
        updates = what.second_order_updates if how.second_order else what.first_order_updates
    numbers = {"updates": updates, "seconds": seconds, "batch": batch, "threads": threads}
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise ExperimentError(f"{name} must be above zero, not {value}.")
    if threads is not None and threads > MOST_THREADS:
        raise ExperimentError(f"threads must be at most {MOST_THREADS}, not {threads}.")
    if seed < 0:
        raise ExperimentError(f"the seed must be zero or more, not {seed}.")
    if seed > MOST:
        raise ExperimentError(f"the seed must be below 2^63, not {seed}.")
    if dtype not in DTYPES:
        raise ExperimentError(f"dtype must be {' or '.join(DTYPES)}, not {dtype!r}.")
    return Config(
        problem=what.name,
        method=how.text,
        seed=seed,
        batch=batch or what.batch,
        dtype=dtype,
        threads=threads or torch.get_num_threads(),
        updates=updates,
        seconds=None if seconds is None else float(seconds),
    )


def with_threads_of(config: Config, saved: Config) -> Config:
    """The same run with a saved one's number of threads, to go on with it bit for bit."""
    return replace(config, threads=saved.threads)
