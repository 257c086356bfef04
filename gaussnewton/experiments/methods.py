"""How a network is trained in the paper's experiments (section 5), by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import gaussnewton as gn
from gaussnewton.errors import ExperimentError
from gaussnewton.experiments.names import look_up
from gaussnewton.experiments.parsing import count, not_negative, positive, yes_or_no

Values = Mapping[str, Any]
Build = Callable[[nn.Module, nn.Module, Values, int], Optimizer]
"""From a model, its criterion, the settings and a seed to an optimiser."""


@dataclass(frozen=True)
class Setting:
    """What can be set about a method.

    Attributes:
        parse: from what was typed to the value; a ValueError says what is wrong.
        default: what it is unless it is set; None where the method does without.
        meaning: for people.
    """

    parse: Callable[[str], Any]
    default: Any
    meaning: str


@dataclass(frozen=True)
class Method:
    """A way of training.

    Attributes:
        name: on the command line and on disk.
        title: for people.
        second_order: whether it uses curvature.
        build: makes the optimiser.
        settings: what can be set.
        chosen: what was set, where it is not the default.
    """

    name: str
    title: str
    second_order: bool
    build: Build
    settings: Mapping[str, Setting]
    chosen: Values = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """All settings."""
        return {key: self.chosen.get(key, each.default) for key, each in self.settings.items()}

    @property
    def text(self) -> str:
        """As it is written on the command line, always in the same way."""
        parts = [
            f"{key}={written(self.chosen[key])}" for key in self.settings if key in self.chosen
        ]
        return self.name + (":" + ",".join(parts) if parts else "")

    @property
    def label(self) -> str:
        """For people, with what was set."""
        parts = [f"{key} {written(value)}" for key, value in self.chosen.items()]
        return ", ".join([self.title, *parts])

    def with_settings(self, **chosen: Any) -> Method:
        """The same method with other settings, as values."""
        for key in chosen:
            look_up(key, self.settings, f"setting of {self.name}")
        every = {**self.chosen, **chosen}
        kept = {
            key: every[key]
            for key, setting in self.settings.items()
            if key in every and every[key] != setting.default
        }
        return replace(self, chosen=kept)

    def optimizer(self, model: nn.Module, criterion: nn.Module, seed: int = 0) -> Optimizer:
        """A new optimiser; the seed is for methods that draw random numbers."""
        return self.build(model, criterion, self.values, seed)

    def rate(self, update: int) -> float | None:
        """The learning rate of an update, the first being 0; None if the method has none.

        It is halved every ``decay`` updates (section 5.1).

        Example:
            >>> from gaussnewton.experiments.methods import method
            >>> adam = method("adam:rate=0.5,decay=10")
            >>> [adam.rate(t) for t in (0, 9, 10, 25)]
            [0.5, 0.5, 0.25, 0.125]
        """
        rate = self.values.get("rate")
        if rate is None:
            return None
        period = self.values["decay"]
        return float(rate if period is None else rate * 0.5 ** (update // period))


def method(text: str) -> Method:
    """A method as it is written on the command line: ``adam``, ``adam:rate=2^-8,decay=5000``.

    Raises:
        ExperimentError: if there is no such method or setting, or a value is none.

    Example:
        >>> from gaussnewton.experiments.methods import method
        >>> method("adam:rate=2^-8,decay=5000").text
        'adam:rate=2^-8,decay=5000'
        >>> method("adam:speed=3")
        Traceback (most recent call last):
            ...
        gaussnewton.errors.ExperimentError: there is no setting of adam 'speed'. There are rate, ...
    """
    name, colon, rest = text.partition(":")
    found = look_up(name, METHODS, "method")
    chosen: dict[str, Any] = {}
    for part in rest.split(",") if colon else []:
        key, equals, value = part.partition("=")
        if not equals:
            raise ExperimentError(
                f"{part!r} in {text!r} is no setting: settings are written "
                "name:setting=value,setting=value."
            )
        setting = look_up(key, found.settings, f"setting of {name}")
        if key in chosen:
            raise ExperimentError(f"{key} is set twice in {text!r}.")
        try:
            chosen[key] = setting.parse(value)
        except ValueError as error:
            raise ExperimentError(f"{key} of {name}: {error}.") from error
    return found.with_settings(**chosen)


def written(value: Any) -> str:
    """A setting's value as it can be typed; small powers of two as such.

    Example:
        >>> from gaussnewton.experiments.methods import written
        >>> written(0.001), written(2.0**-6), written(True)
        ('0.001', '2^-6', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.frexp(value)[0] == 0.5 and value < 0.1:
        return f"2^{round(math.log2(value))}"
    return repr(value) if isinstance(value, float) else str(value)


def _inversion(text: str) -> str:
    if text not in ("factored", "exact"):
        raise ValueError(f"{text!r} is neither factored nor exact")
    return text


ETA = Setting(not_negative, 0.0, "η, an L2 penalty η/2 ‖θ‖²")
RATE = Setting(positive, 0.01, "learning rate")
DECAY = Setting(count, None, "updates after which the rate is halved, again and again")
FIRST_ORDER = {"rate": RATE, "decay": DECAY, "weight_decay": ETA}
SECOND_ORDER = {
    "weight_decay": ETA,
    "inversion": Setting(_inversion, "factored", "of the damped blocks: factored or exact"),
    "tau": Setting(positive, None, "τ at the start; found on the first batch if not given"),
}
KFAC_ONLY = {"samples": Setting(count, 1, "draws for each datum")}
HESSIAN_FREE = {
    "weight_decay": ETA,
    "iterations": Setting(count, 250, "the most of conjugate gradients in an update"),
    "precondition": Setting(yes_or_no, False, "yes: with KFRA's damped blocks"),
}


def _sgd(momentum: float, nesterov: bool = False) -> Build:
    def build(model: nn.Module, _: nn.Module, values: Values, __: int) -> Optimizer:
        return torch.optim.SGD(
            model.parameters(),
            lr=values["rate"],
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=values["weight_decay"],
        )

    return build


def _adam(model: nn.Module, _: nn.Module, values: Values, __: int) -> Optimizer:
    return torch.optim.Adam(
        model.parameters(), lr=values["rate"], weight_decay=values["weight_decay"]
    )


def _gauss_newton(curvature: str | None, average: float | None) -> Build:
    """The paper's configuration with this curvature; the package's own where that is None."""

    def build(model: nn.Module, criterion: nn.Module, values: Values, seed: int) -> Optimizer:
        settings: dict[str, Any] = dict(gn.PAPER) if curvature else {}
        if curvature:
            settings["curvature"] = curvature
        if curvature == "kfac":
            settings["curvature"] = gn.KFAC(samples=values["samples"], seed=seed)
        if average is not None:
            settings["refresh"] = replace(settings["refresh"], decay=average)
        if values["tau"] is not None:
            settings["damping"] = replace(settings.get("damping", gn.Damping()), tau=values["tau"])
        return gn.GaussNewton(
            model,
            criterion,
            weight_decay=values["weight_decay"],
            inversion=values["inversion"],
            **settings,
        )

    return build


def _hessian_free(model: nn.Module, criterion: nn.Module, values: Values, _: int) -> Optimizer:
    return gn.HessianFree(model, criterion, **values)


def _papers(curvature: str) -> tuple[Method, Method]:
    """With and without a moving average of the curvature, with the paper's factor 0.9."""
    title = curvature.upper()
    settings = SECOND_ORDER | (KFAC_ONLY if curvature == "kfac" else {})
    return (
        Method(curvature, title, True, _gauss_newton(curvature, 0.0), settings),
        Method(
            f"{curvature}-ma",
            f"{title} with moving average",
            True,
            _gauss_newton(curvature, 0.9),
            settings,
        ),
    )


METHODS: dict[str, Method] = {
    each.name: each
    for each in (
        Method("default", "GaussNewton", True, _gauss_newton(None, None), SECOND_ORDER),
        *_papers("kfra"),
        *_papers("kfac"),
        *_papers("kflr"),
        Method("hessian-free", "Hessian-free", True, _hessian_free, HESSIAN_FREE),
        Method("sgd", "SGD", False, _sgd(0.0), FIRST_ORDER),
        Method("momentum", "Momentum", False, _sgd(0.9), FIRST_ORDER),
        Method("nesterov", "Nesterov", False, _sgd(0.9, nesterov=True), FIRST_ORDER),
        Method("adam", "Adam", False, _adam, FIRST_ORDER | {"rate": replace(RATE, default=0.001)}),
    )
}
"""All methods, by name. The paper gives no η and no momentum of the first-order methods: 0 and
0.9 here. ``default`` is ``gn.GaussNewton`` untouched; the other Kronecker-factored ones are
``gn.PAPER``."""
