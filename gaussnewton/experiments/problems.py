"""What is trained in the paper's experiments (section 5), by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

import gaussnewton as gn
from gaussnewton.experiments.data import curves, load
from gaussnewton.experiments.names import look_up

ENCODER = (1000, 500, 250, 30)
"""The layers between the input and the code."""

Data = tuple[Tensor, Tensor | None]
"""Inputs, one a row, and targets; None where the inputs are their own."""


@dataclass(frozen=True)
class Problem:
    """A network, a loss and data.

    The objective that is minimised and shown is ``scale`` times the criterion's value. With the
    number of pixels as the scale it is the paper's: summed over pixels, mean over images. The
    learning rates of first-order methods and η are meant for that objective.

    Attributes:
        name: on the command line and on disk.
        title: for people.
        sizes: of the layers, input first.
        criterion: makes the loss module.
        data: reads the training data, from a folder if it needs files.
        scale: what the criterion's value is multiplied by.
        shown: what the objective then is.
        batch: data in a batch.
        first_order_updates: the paper's budget for first-order methods.
        second_order_updates: and for second-order ones.
    """

    name: str
    title: str
    sizes: tuple[int, ...]
    criterion: Callable[[], nn.Module]
    data: Callable[[str | Path | None], Data]
    scale: float
    shown: str
    batch: int = 1000
    first_order_updates: int = 40_000
    second_order_updates: int = 5_000

    def network(self, seed: int) -> nn.Sequential:
        """Linear layers with tanh between, by Glorot's initialisation; biases start at zero.

        Torch's own random state is left as it was.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers: list[nn.Module] = []
            for a, b in pairwise(self.sizes):
                linear = nn.Linear(a, b)
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
                layers += [linear, nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    def architecture(self) -> str:
        """The sizes of the layers, as the paper writes them."""
        return "-".join(map(str, self.sizes))


def problem(name: str) -> Problem:
    """A problem by its name.

    Raises:
        ExperimentError: if there is none of that name.

    Example:
        >>> from gaussnewton.experiments.problems import problem
        >>> problem("mnist").architecture()
        '784-1000-500-250-30-250-500-1000-784'
        >>> problem("minst")
        Traceback (most recent call last):
            ...
        gaussnewton.errors.ExperimentError: there is no problem 'minst'; did you mean 'mnist'? ...
    """
    return look_up(name, PROBLEMS, "problem")


def autoencoder(
    name: str,
    title: str,
    width: int,
    criterion: Callable[[], nn.Module],
    shown: str,
    first_order_updates: int = 40_000,
    second_order_updates: int = 5_000,
) -> Problem:
    """One of the paper's three: D-1000-500-250-30-250-500-1000-D."""
    return Problem(
        name=name,
        title=title,
        sizes=(width, *ENCODER, *ENCODER[-2::-1], width),
        criterion=criterion,
        data=lambda folder: (load(name, folder).images, None),
        scale=float(width),
        shown=shown,
        first_order_updates=first_order_updates,
        second_order_updates=second_order_updates,
    )


def _even_or_odd(folder: str | Path | None) -> Data:
    digits = load("mnist", folder)
    assert digits.labels is not None
    return digits.images, (digits.labels % 2).to(digits.images.dtype)


def _small_curves(_: str | Path | None) -> Data:
    images = curves(count=1000).unflatten(1, (1, 28, 28))
    return avg_pool2d(images, 2).flatten(1), None


CROSS_ENTROPY = "cross-entropy in nats, summed over pixels, mean over images"
SQUARED_ERROR = "squared error (not halved), summed over pixels, mean over images"

PROBLEMS: dict[str, Problem] = {
    each.name: each
    for each in (
        autoencoder("curves", "CURVES autoencoder", 28**2, nn.BCEWithLogitsLoss, CROSS_ENTROPY),
        autoencoder(
            "faces", "FACES autoencoder", 25**2, nn.MSELoss, SQUARED_ERROR, 160_000, 20_000
        ),
        autoencoder("mnist", "MNIST autoencoder", 28**2, nn.BCEWithLogitsLoss, CROSS_ENTROPY),
        Problem(
            name="mixture",
            title="MNIST, even or odd, mixture of two classifiers",
            # The paper writes one output; its density has three: a gate and two classifiers.
            sizes=(784, *ENCODER, 3),
            criterion=gn.BinaryMixtureLoss,
            data=_even_or_odd,
            scale=1.0,
            shown="negative log-likelihood in nats, mean over images",
        ),
        Problem(
            name="tiny",
            title="small autoencoder of generated curves",
            sizes=(196, 64, 32, 8, 32, 64, 196),
            criterion=nn.BCEWithLogitsLoss,
            data=_small_curves,
            scale=196.0,
            shown=CROSS_ENTROPY,
            batch=250,
            first_order_updates=1_000,
            second_order_updates=200,
        ),
    )
}
"""The paper's problems, and ``tiny``, which trains in seconds, to try things."""
