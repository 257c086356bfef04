"""Who reached what when: medians over the seeds, ratios to ours, and the bars that were set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from race.settings import RUNNERS
from race.store import Line
from race.tasks import TASKS
from race.times import NEVER, Reached, loss_of, median, reached

Runs = dict[str, dict[int, Line]]
"""By runner, then by seed, as ``Store.runs`` has them."""


@dataclass(frozen=True)
class Target:
    """A loss to reach: a number, or for each seed what the best first-order peer came to.

    Attributes:
        name: the number, the median one if seeds differ.
        of: the loss for each seed.
        origin: where it comes from, in words; nothing for a number that was set.
    """

    name: str
    of: dict[int, float]
    origin: str = ""


@dataclass(frozen=True)
class Standing:
    """A runner, or the best of several, at a target.

    Attributes:
        who: the runner; for the best of several the one that most often was.
        when: medians over the seeds.
        tried: the median seconds where a seed that did not reach it counts with those after
            which it was given up: a lower bound.
    """

    who: str
    when: Reached
    tried: float

    def ratio(self, ours: Standing) -> float:
        """How many times the seconds of ours; a lower bound if it was given up."""
        return (self.when.seconds if self.when.ever else self.tried) / ours.when.seconds


def targets_of(problem: str, runs: Runs) -> list[Target]:
    """What is to be reached on a problem."""
    seeds = sorted({seed for lines in runs.values() for seed in lines})
    if TASKS[problem].targets:
        return [Target(f"{t:g}", dict.fromkeys(seeds, t)) for t in TASKS[problem].targets]
    best: dict[int, Line] = {}
    for line in (line for lines in runs.values() for line in lines.values() if line["leader"]):
        least = min(line, best.get(line["seed"], line), key=lambda each: loss_of(each["marks"][-1]))
        best[line["seed"]] = least
    if not best:
        return []
    of = {seed: loss_of(line["marks"][-1]) for seed, line in best.items()}
    names = Counter(RUNNERS[line["runner"]].title for line in best.values())
    after = median([line["marks"][-1][1] for line in best.values()])
    origin = f"what the best first-order peer ({' or '.join(names)}) has after {after:.0f} s"
    return [Target(f"{median(list(of.values())):.4g}", of, origin)]


def standing(runners: Sequence[str], runs: Runs, target: Target) -> Standing | None:
    """A runner at a target; of several, in each seed the one that was there first."""
    found: list[tuple[Reached, str, float]] = []
    for seed, loss in target.of.items():
        here = [runs[r][seed] for r in runners if seed in runs.get(r, {})]
        if here:
            found.append(_first(here, loss))
    if not found:
        return None
    return Standing(
        who=Counter(who for _, who, _ in found).most_common(1)[0][0],
        when=Reached(
            median([when.seconds for when, _, _ in found]),
            median([when.updates for when, _, _ in found]),
        ),
        tried=median([when.seconds if when.ever else tried for when, _, tried in found]),
    )


def _first(lines: Sequence[Line], loss: float) -> tuple[Reached, str, float]:
    """Of a seed's runs the first to reach a loss; if none did, the one that tried longest."""
    whens = [(reached(line["marks"], loss), line) for line in lines]
    when, line = min(whens, key=lambda pair: (pair[0].seconds, -pair[1]["marks"][-1][1]))
    return (when if when.ever else NEVER), line["runner"], float(line["marks"][-1][1])


@dataclass(frozen=True)
class Bar:
    """A ratio that ours is to reach against some peers."""

    problem: str
    against: str
    runners: tuple[str, ...]
    factor: float


PEERS = tuple(name for name, entry in RUNNERS.items() if entry.kind == "first-order")
BARS = (
    Bar("mnist", "the best first-order peer", PEERS, 6.0),
    Bar("mnist", "kfac-jax", ("kfac-jax",), 3.0),
    Bar("curves", "the best first-order peer", PEERS, 6.0),
    Bar("faces", "the best first-order peer", PEERS, 6.0),
)


def verdict(ours: Standing, theirs: Standing, factor: float) -> str:
    """Whether ours is so many times faster, as far as the race can tell."""
    if not ours.when.ever:
        return "not reached: ours did not reach the loss"
    ratio = theirs.ratio(ours)
    if ratio >= factor:
        return "reached"
    return "not reached" if theirs.when.ever else "open: the peer was given up too early to tell"
