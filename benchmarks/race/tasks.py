"""What is raced on: five networks with their data and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from networks import convolutional
from torch import Tensor, nn

from gaussnewton.experiments.data import mnist
from gaussnewton.experiments.problems import CROSS_ENTROPY, ENCODER, SQUARED_ERROR, problem
from gaussnewton.experiments.problems import Problem as Described

JUDGED = 10_000
"""So many training data are judged, the same in every run, drawn by chance."""


@dataclass(frozen=True)
class Task:
    """A network, a loss and data.

    Attributes:
        title: for people.
        network: makes the model; the same seed gives the same parameters.
        criterion: makes the loss module.
        scale: the objective is this times the criterion's value.
        shown: what the objective is.
        data: reads inputs and targets; targets None where the inputs are their own.
        batch: data in a batch.
        targets: losses to reach; without them, what the best first-order peer has at its end.
        long: whether the best first-order peer goes on when the others' time is over.
    """

    title: str
    network: Callable[[int], nn.Sequential]
    criterion: Callable[[], nn.Module]
    scale: float
    shown: str
    data: Callable[[Path | None], tuple[Tensor, Tensor | None]]
    batch: int
    targets: tuple[float, ...] = ()
    long: bool = False

    def loss(self, model: nn.Module, criterion: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The objective."""
        return self.scale * criterion(model(x), y)


def _papers(name: str, targets: tuple[float, ...] = ()) -> Task:
    given = problem(name)
    return Task(
        given.title, given.network, given.criterion, given.scale, given.shown, given.data,
        given.batch, targets, long=True,
    )  # fmt: skip


def _digits(folder: Path | None) -> tuple[Tensor, Tensor]:
    return mnist(folder)


def _squares(folder: Path | None) -> tuple[Tensor, Tensor]:
    x, y = mnist(folder)
    return x.reshape(-1, 1, 28, 28), y


def _classifier(seed: int) -> nn.Sequential:
    """The encoder of the paper's autoencoders with ten outputs, by Glorot's initialisation."""
    sizes = (784, *ENCODER, 10)
    described = Described("", "", sizes, nn.CrossEntropyLoss, lambda _: _digits(None), 1.0, "")
    return described.network(seed)


def _cnn(seed: int) -> nn.Sequential:
    """That of ``benchmarks/networks.py``, with torch's own initialisation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = convolutional()
    assert isinstance(made, nn.Sequential)
    return made


NATS = "cross-entropy in nats, mean over images"

TASKS: dict[str, Task] = {
    "mnist": _papers("mnist", (60.0, 55.0, 53.0)),
    "curves": _papers("curves"),
    "faces": _papers("faces"),
    "classifier": Task(
        "MNIST classifier", _classifier, nn.CrossEntropyLoss, 1.0, NATS, _digits, 1000
    ),
    "cnn": Task("CNN, MNIST digits", _cnn, nn.CrossEntropyLoss, 1.0, NATS, _squares, 128),
}

assert TASKS["faces"].shown == SQUARED_ERROR
assert TASKS["mnist"].shown == CROSS_ENTROPY


@dataclass(frozen=True)
class Data:
    """A task's data in memory, and the rows that are judged."""

    x: Tensor
    y: Tensor | None
    sample: Tensor

    def judged(self, count: int | None = None) -> tuple[Tensor, Tensor]:
        """The judged data, or the first few of them."""
        rows = self.sample[:count]
        x = self.x[rows]
        return x, x if self.y is None else self.y[rows]


def read(task: Task, folder: Path | None) -> Data:
    """Read the data and draw the sample."""
    x, y = task.data(folder)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return Data(x, y, order[:JUDGED])
