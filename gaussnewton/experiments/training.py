"""A network being trained: one update after another, with numbers about each."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import gaussnewton as gn
from gaussnewton.experiments.config import DTYPES, Config
from gaussnewton.experiments.data import Batches
from gaussnewton.experiments.problems import Data
from gaussnewton.experiments.record import Line

EVALUATED = 5_000
"""So many training data are evaluated: the same of a data set in every run, drawn by chance, since
data may be sorted. More would cost a run half of its time."""

COUNTERS = ("refused", "skipped", "mended")
STEP = ("rho", "alpha", "momentum", "predicted", "actual", "iterations")
"""What an optimiser says of a step it chose; it says nothing of the kind where it chose none."""


class Training:
    """A network, its optimiser and its batches, somewhere on their way.

    Args:
        config: what is asked.
        data: of the problem.
    """

    def __init__(self, config: Config, data: Data) -> None:
        problem, dtype = config.the_problem(), DTYPES[config.dtype]
        self.method, self.scale = config.the_method(), problem.scale
        x, y = (None if each is None else _cast(each, dtype) for each in data)
        assert x is not None
        self.model = problem.network(config.seed).to(dtype)
        self.criterion = problem.criterion()
        self.optimizer: Optimizer = self.method.optimizer(self.model, self.criterion, config.seed)
        self.batches = Batches(x, y, config.batch, config.seed)
        chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:EVALUATED]
        self.evaluated = x[chosen], (x if y is None else y)[chosen]
        self.update, self.seconds = 0, 0.0

    def step(self) -> Line:
        """One update; only it is timed, not the making of the batch."""
        x, y = next(self.batches)
        rate = self.method.rate(self.update)
        if rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        started = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.scale * self.criterion(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        batch_loss = loss.item()
        self.seconds += time.perf_counter() - started
        self.update += 1
        line = {"update": self.update, "seconds": self.seconds, "batch_loss": batch_loss}
        return line | ({} if rate is None else {"rate": rate}) | self._diagnostics()

    def start(self) -> Line:
        """The line before the first update."""
        return {"update": 0, "seconds": 0.0}

    def evaluate(self) -> Line:
        """The objective on the evaluated data, also with averaged parameters if there are any."""
        result = {"loss": self._objective()}
        if self.method.second_order:
            with self._observing().averaged():
                result["averaged_loss"] = self._objective()
        return result

    @torch.no_grad()
    def _objective(self) -> float:
        x, y = self.evaluated
        return self.scale * self.criterion(self.model(x), y).item()

    def _observing(self) -> gn.GaussNewton | gn.HessianFree:
        assert isinstance(self.optimizer, (gn.GaussNewton, gn.HessianFree))
        return self.optimizer

    def _diagnostics(self) -> Line:
        """What the optimiser says of its last step."""
        if not self.method.second_order:
            return {}
        said = self._observing().diagnostics
        keys = ("tau", "gamma", "noise", *STEP)
        found = {key: said[key] for key in keys if said.get(key) is not None}
        return found | {key: said[key] for key in COUNTERS if said.get(key)}

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on bit for bit: plain values and tensors."""
        return {
            "update": self.update,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches.state_dict(),
            "random_state": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.update, self.seconds = state["update"], state["seconds"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.load_state_dict(state["batches"])
        torch.set_rng_state(state["random_state"])


def due(update: int) -> bool:
    """Whether to evaluate after an update: ever more rarely, whatever the budget.

    Every update up to 10, every 2nd up to 20, every 5th up to 50, every 10th up to 100, and so on,
    so that a logarithmic axis is covered evenly and a longer run has a shorter one's marks.

    Example:
        >>> from gaussnewton.experiments.training import due
        >>> [t for t in range(6, 130) if due(t)]
        [6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 25, 30, 35, 40, 45, 50, 60, 70, 80, 90, 100, 120]
    """
    if update < 10:
        return True
    decade = 10 ** int(math.log10(update) + 1e-9)
    tenths = next(step for least, step in ((5, 10), (2, 5), (1, 2)) if update >= least * decade)
    return update % (tenths * decade // 10) == 0


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.to(dtype) if values.is_floating_point() else values
