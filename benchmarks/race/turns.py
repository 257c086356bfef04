"""Contenders of one problem and seed, each a little at a time, so that all share every moment."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from race.contender import Contender
from race.settings import OURS, RUNNERS, Setting
from race.times import reached

APART = 1.1
"""A contender is judged again when its seconds have grown by this factor."""
LOST = 10.0
"""A loss that is so many times the first one will not come back."""
FOLLOWERS = (OURS, "kfac-jax")
"""Who goes on beside the best first-order peer when the others' time is over."""


@dataclass
class Track:
    """A contender on its way."""

    runner: str
    setting: Setting
    contender: Contender
    marks: list[list[float | int | str]] = field(default_factory=list)
    leader: bool = False

    @property
    def seconds(self) -> float:
        """Of its updates so far."""
        return self.contender.seconds

    @property
    def loss(self) -> float:
        """The last one."""
        loss = float(self.marks[-1][2])
        return loss if math.isfinite(loss) else math.inf

    @property
    def least(self) -> float:
        """The least one so far."""
        return min(float(mark[2]) for mark in self.marks if not math.isnan(float(mark[2])))

    @property
    def alive(self) -> bool:
        """Whether going on makes sense."""
        first = float(self.marks[0][2])
        return not self.contender.failure and self.loss < LOST * first

    def judge(self) -> None:
        """Add a mark."""
        loss, of = self.contender.evaluate()
        self.marks.append([self.contender.updates, self.seconds, loss, of])

    def advance(self, seconds: float, end: float) -> None:
        """Go on, and be judged when it is time or when all of the time is used."""
        self.contender.advance(min(seconds, end - self.seconds))
        last = float(self.marks[-1][1])
        if self.seconds >= min(end, APART * last) or not self.alive:
            self.judge()


def turn_of(seconds: float, longest: float) -> float:
    """The length of a turn: short ones first, where losses fall fastest.

    >>> [turn_of(seconds, 2.0) for seconds in (0.0, 4.0, 100.0)]
    [0.25, 1.0, 2.0]
    """
    return min(longest, max(longest / 8, seconds / 4))


def take_turns(
    tracks: Sequence[Track],
    end: float,
    longest: float,
    goes: Callable[[Track], bool],
    seed: int,
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Turns in a shuffled order until nobody goes on, or all have used so many seconds.

    ``watch`` is called after each round.
    """
    order = random.Random(seed)
    while True:
        going = [t for t in tracks if t.alive and t.seconds < end and goes(t)]
        if not going:
            return
        order.shuffle(going)
        for track in going:
            track.advance(turn_of(track.seconds, longest), end)
        watch()


def race(
    tracks: Sequence[Track],
    targets: Sequence[float],
    seconds: float,
    long_seconds: float | None,
    longest: float,
    seed: int = 0,
    stop: bool = False,
    watch: Callable[[], None] = lambda: None,
    give_up: float = math.inf,
    leaders: int = 1,
) -> None:
    """All for some seconds; then some go on.

    The best first-order peer goes on, or the best few, up to ``long_seconds``, and beside it those
    of FOLLOWERS. With targets they go on until they reach the last one. Without, the loss to reach
    is what the peer will have at its end: a follower sits out while its loss is lower than what
    the peer has by now, and goes on when the peer has passed it.

    Args:
        tracks: who takes part, each with a first mark.
        targets: losses to reach, the last one the least; none if the peer sets it.
        seconds: for all.
        long_seconds: for those that go on; None if nobody does.
        longest: a turn, in seconds.
        seed: of the order of turns.
        stop: whether those that have reached the last target stop before their time is over.
        watch: called after each round.
        give_up: with targets, who has used so many times the seconds that ours took to the last
            one stops.
        leaders: how many of the first-order peers go on.
    """
    last = targets[-1] if targets else -math.inf
    take_turns(tracks, seconds, longest, lambda t: not stop or t.least > last, seed, watch)
    peers = [t for t in tracks if RUNNERS[t.runner].kind == "first-order" and t.alive]
    if not peers:
        return
    ahead = sorted(peers, key=lambda t: t.loss)[:leaders]
    for track in ahead:
        track.leader = True
    if long_seconds is None:
        return
    going = [*ahead, *(t for t in tracks if t.runner in FOLLOWERS)]
    if targets:
        ours = [t for t in tracks if t.runner == OURS]

        def goes(track: Track) -> bool:
            arrived = min((reached(t.marks, last).seconds for t in ours), default=math.inf)
            return track.least > last and track.seconds < give_up * arrived

        take_turns(going, long_seconds, longest, goes, seed, watch)
    else:
        take_turns(
            going,
            long_seconds,
            longest,
            lambda t: t.leader or t.least > min(each.least for each in ahead),
            seed,
            watch,
        )
