"""A network in training that can be told to go on for some seconds, and be judged."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

import gaussnewton as gn
from gaussnewton.errors import GaussNewtonError
from gaussnewton.experiments.data import Batches
from race.clock import Lap
from race.defaults import KEY, fingerprint
from race.optimizers import build, muons_precision
from race.settings import MEMORIES, OURS, Setting
from race.tasks import Data, Task

CHOSEN_ON = 2_000
"""Of the judged data, so many choose between the parameters and their running means."""


class Contender(Protocol):
    """What the race asks of a contender.

    Attributes:
        updates: made so far.
        seconds: of all its updates, as :class:`race.clock.Lap` has them; batches, running means
            and judging are not counted.
        failure: why it cannot go on; empty if it can.
        versions: of packages that are in another environment, and of our own settings.
    """

    updates: int
    seconds: float
    failure: str
    versions: dict[str, str]

    def advance(self, seconds: float) -> None:
        """Updates until so many more seconds have passed."""

    def evaluate(self) -> tuple[float, str]:
        """The loss of the judged data, and whose it is: "present", "averaged" or a memory."""

    def close(self) -> None:
        """Give back what it holds."""


class Means:
    """Running means of parameters, one for each memory."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.kept: dict[float, list[Tensor]] = {}

    @torch.no_grad()
    def update(self, t: int) -> None:
        """Take in the parameters after update t, the first being 1."""
        for memory in MEMORIES:
            if memory not in self.kept:
                self.kept[memory] = [p.detach().clone() for p in self.parameters]
            torch._foreach_lerp_(self.kept[memory], self.parameters, max(1 - memory, 1 / t))


class TorchContender:
    """A model trained by torch optimisers.

    Args:
        task: what is trained.
        data: of the task.
        runner: by whom.
        setting: one of its grid.
        seed: of the parameters and of the batches' order.
        horizon: the seconds that shares of the budget, as which decay periods are given, refer to.
    """

    def __init__(
        self, task: Task, data: Data, runner: str, setting: Setting, seed: int, horizon: float
    ) -> None:
        self.task, self.setting, self.horizon = task, setting, horizon
        self.model, self.criterion = task.network(seed), task.criterion()
        self.optimizers = build(runner, self.model, self.criterion, setting)
        self.batches = Batches(data.x, data.y, task.batch, seed)
        self.few, self.judged = data.judged(CHOSEN_ON), data.judged()
        self.updates, self.seconds, self.failure = 0, 0.0, ""
        ours = isinstance(self.optimizers[0], gn.GaussNewton)
        self.versions = {KEY: fingerprint()} if runner == OURS else {}
        if runner.startswith("muon"):
            self.versions = {"iterations of Muon": muons_precision()}
        self.means = None if ours else Means(list(self.model.parameters()))

    def advance(self, seconds: float) -> None:
        end = self.seconds + seconds
        while self.seconds < end and not self.failure:
            try:
                self._update()
            except (GaussNewtonError, RuntimeError) as error:  # some raise where others have NaN
                self.failure = f"{type(error).__name__} after {self.updates} updates"

    def _update(self) -> None:
        x, y = next(self.batches)
        self._set_rate()
        lap = Lap()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.task.loss(self.model, self.criterion, x, y).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.seconds += lap.seconds()
        self.updates += 1
        if self.means is not None:
            self.means.update(self.updates)

    def _set_rate(self) -> None:
        if "rate" in self.setting:
            rate = rate_at(self.setting, self.seconds / self.horizon)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate

    @torch.no_grad()
    def evaluate(self) -> tuple[float, str]:
        optimizer = self.optimizers[0]
        if isinstance(optimizer, gn.GaussNewton):
            with optimizer.averaged():
                return self._loss(self.judged), "averaged"
        assert self.means is not None
        parameters = self.means.parameters
        present = [p.detach().clone() for p in parameters]
        candidates = {"present": present, **{str(m): p for m, p in self.means.kept.items()}}
        losses = {}
        for name, values in candidates.items():
            torch._foreach_copy_(parameters, values)
            losses[name] = self._loss(self.few)
        best = min(losses, key=lambda name: _orderly(losses[name]))
        torch._foreach_copy_(parameters, candidates[best])
        loss = self._loss(self.judged)
        torch._foreach_copy_(parameters, present)
        return loss, best

    def _loss(self, data: tuple[Tensor, Tensor]) -> float:
        """By parts that fit the cache; what watches the model must not take them for training."""
        x, y = data
        parts = zip(x.split(1000), y.split(1000), strict=True)
        losses = [
            self.task.loss(self.model, self.criterion, a, b).item() * len(a) for a, b in parts
        ]
        return sum(losses) / len(x)

    def close(self) -> None:
        self.optimizers, self.means = [], None
        self.model = nn.Sequential()


def rate_at(setting: Setting, share: float) -> float:
    """The rate after a share of the budget: halved each time a decay period has passed.

    >>> [rate_at({"rate": 0.5, "decay": 0.25}, share) for share in (0, 0.2, 0.25, 0.6)]
    [0.5, 0.5, 0.25, 0.125]
    """
    decay = setting["decay"]
    halvings = math.floor(share / decay) if decay < 1 else 0
    return float(setting["rate"] * 0.5**halvings)


def _orderly(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf
