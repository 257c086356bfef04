"""The search for each peer's setting, and the race of all: what is not yet in the raw results."""

from __future__ import annotations

import gc
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from race import jax_contender
from race.contender import Contender, TorchContender
from race.defaults import KEY, fingerprint
from race.halving import best_of, rungs
from race.jax_contender import Child, JaxContender
from race.settings import OURS, RUNNERS, Setting, setting_text
from race.store import Line, Store
from race.tasks import TASKS, Data, Task, read
from race.turns import FOLLOWERS, Track, race

SEARCH_SEED = 0


@dataclass(frozen=True)
class Budgets:
    """How long everything takes: seconds of updates.

    Attributes:
        search: for each setting of a grid; the best quarter gets four times as much.
        race: for each contender.
        long: for the best first-order peer, and others as far as they need it.
        turn: the longest turn.
        stop: whether who has reached the last target stops.
        threads: of torch and of XLA.
        powers: the rates that are tried, as powers of two; none for all of a grid.
        decays: the decay periods that are tried; none for all.
        give_up: who has used so many times our seconds to the last target stops.
        leaders: how many of the first-order peers go on, the best ones.
    """

    search: float
    race: float
    long: float
    turn: float
    stop: bool
    threads: int
    powers: tuple[int, ...] = ()
    decays: tuple[float, ...] = ()
    give_up: float = math.inf
    leaders: int = 1

    def grid(self, runner: str) -> list[Setting]:
        """What is tried of a runner."""
        return RUNNERS[runner].limited(self.powers, self.decays).grid()

    def long_of(self, task: Task) -> float | None:
        """How long the best first-order peer goes on; None if it does not."""
        return self.long if task.long and self.long > self.race else None

    def horizon(self, task: Task) -> float:
        """The seconds that decay periods are shares of."""
        return self.long_of(task) or self.race


def missing(runner: str) -> str:
    """What a runner needs that is not there."""
    needs = RUNNERS[runner].needs
    if needs == "kfac_jax":
        return "" if jax_contender.available() else "benchmarks/.venv-jax"
    return "" if importlib.util.find_spec(needs) else needs


class Runs:
    """One problem: its data, and contenders made on them."""

    def __init__(self, name: str, folder: Path | None, say: Callable[[str], None]) -> None:
        self.name, self.task, self.say = name, TASKS[name], say
        self.data: Data = read(self.task, folder)
        self._child: Child | None = None
        self._warm: set[str] = set()
        self._first: dict[int, float] = {}

    def contender(self, runner: str, setting: Setting, seed: int, horizon: float) -> Contender:
        """A new one, with all that happens only once in a process behind it."""
        if RUNNERS[runner].needs == "kfac_jax":
            if self._child is None or not self._child.alive:
                self._child = Child(self.task, self.data)
            return JaxContender(self._child, setting, seed, self.first_loss(seed))
        if runner not in self._warm:
            again = TorchContender(self.task, self.data, runner, setting, seed, horizon)
            for _ in range(2):
                again.advance(1e-9)
            again.close()
            self._warm.add(runner)
        return TorchContender(self.task, self.data, runner, setting, seed, horizon)

    @torch.no_grad()
    def first_loss(self, seed: int) -> float:
        """The loss before the first update."""
        if seed not in self._first:
            x, y = self.data.judged()
            loss = self.task.loss(self.task.network(seed), self.task.criterion(), x, y)
            self._first[seed] = loss.item()
        return self._first[seed]

    def close(self) -> None:
        """End the process that has JAX."""
        if self._child is not None:
            self._child.close()

    def trial(self, runner: str, budgets: Budgets, store: Store) -> Callable[..., float]:
        """The loss of a setting after some seconds: from the raw results, or by trying."""

        def run(setting: Setting, seconds: float) -> float:
            key: Line = {
                "kind": "search", "problem": self.name, "runner": runner, "seed": SEARCH_SEED,
                "setting": setting, "seconds": seconds, "threads": budgets.threads,
            }  # fmt: skip
            found = store.find(**key)
            if found is None:
                contender = self.contender(runner, setting, SEARCH_SEED, seconds)
                first = [0, 0.0, self.first_loss(SEARCH_SEED), "present"]
                track = Track(runner, setting, contender, [first])
                for share in (0.25, 1.0):  # an early look, to give up what is lost
                    if track.alive:
                        track.advance(share * seconds, share * seconds)
                loss, of = track.loss, track.marks[-1][3]
                store.add([key | {"loss": loss, "of": of, "updates": contender.updates}])
                contender.close()
                gc.collect()
                self.say(
                    f"{self.name}: {runner}, {setting_text(setting)}, {seconds:g} s: {loss:.4g}"
                )
                return loss
            return float("inf") if found["loss"] is None else float(found["loss"])

        return run

    def chosen(self, runner: str, budgets: Budgets, store: Store) -> Setting:
        """The best of a runner's grid."""
        return best_of(budgets.grid(runner), self.trial(runner, budgets, store), budgets.search)

    def race(self, settings: dict[str, Setting], seed: int, budgets: Budgets, store: Store) -> None:
        """One seed, unless it is among the raw results as it would be run now."""
        keys: list[Line] = [
            {
                "kind": "race", "problem": self.name, "seed": seed, "runner": runner,
                "setting": setting, "seconds": budgets.race, "long": budgets.long_of(self.task),
                "stop": budgets.stop, "threads": budgets.threads,
            }
            for runner, setting in settings.items()
        ]  # fmt: skip
        if all(_is_of_now(store.find(**key)) for key in keys):
            return
        started, tracks = time.time(), []
        torch.manual_seed(seed)
        for runner, setting in settings.items():
            contender = self.contender(runner, setting, seed, budgets.horizon(self.task))
            first = [0, 0.0, self.first_loss(seed), "present"]
            tracks.append(Track(runner, setting, contender, [first]))
        race(
            tracks, self.task.targets, budgets.race, budgets.long_of(self.task), budgets.turn,
            seed, budgets.stop, self._watch(tracks), budgets.give_up, budgets.leaders,
        )  # fmt: skip
        store.add([key | _outcome(track) for key, track in zip(keys, tracks, strict=True)])
        ends = ", ".join(f"{t.runner} {t.loss:.4g}" for t in tracks)
        self.say(f"{self.name}, seed {seed}, {time.time() - started:.0f} s in all: {ends}")
        for track in tracks:
            track.contender.close()
        gc.collect()

    def _watch(self, tracks: list[Track]) -> Callable[[], None]:
        """Says every minute how far everyone is."""
        said = time.time()

        def watch() -> None:
            nonlocal said
            if time.time() - said > 60:
                said = time.time()
                now = (f"{t.runner} {t.loss:.4g} at {t.seconds:.0f} s" for t in tracks)
                self.say(f"{self.name}: {', '.join(now)}")

        return watch


def _is_of_now(line: Line | None) -> bool:
    """Whether there is a result, and not of earlier defaults of ours."""
    if line is None or line["runner"] != OURS:
        return line is not None
    return bool((line.get("versions") or {}).get(KEY) == fingerprint())


def _outcome(track: Track) -> Line:
    contender = track.contender
    return {
        "leader": track.leader, "failure": contender.failure, "versions": contender.versions,
        "marks": track.marks,
    }  # fmt: skip


def most_seconds(
    problems: Sequence[str], runners: Sequence[str], seeds: int, budgets: Budgets
) -> tuple[float, float]:
    """The most seconds of updates that search and race may take; judging comes on top."""
    search = sum(
        count * seconds
        for runner in runners
        for count, seconds in rungs(len(budgets.grid(runner)), budgets.search)
    )
    racing = 0.0
    for name in problems:
        long = budgets.long_of(TASKS[name])
        peers = sum(RUNNERS[runner].kind == "first-order" for runner in runners)
        going = min(budgets.leaders, peers) + sum(runner in FOLLOWERS for runner in runners)
        racing += len(runners) * budgets.race + (going * (long - budgets.race) if long else 0.0)
    return search * len(problems), racing * seeds
