"""Methods as they are written on the command line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import gaussnewton as gn
from gaussnewton.errors import ExperimentError
from gaussnewton.experiments.methods import METHODS, Method, method


def optimizer(text: str, seed: int = 0) -> torch.optim.Optimizer:
    return method(text).optimizer(nn.Linear(2, 2), nn.MSELoss(), seed)


def gauss_newton(text: str, seed: int = 0) -> gn.GaussNewton:
    made = optimizer(text, seed)
    assert isinstance(made, gn.GaussNewton)
    return made


def test_default_is_untouched() -> None:
    ours, plain = gauss_newton("default"), gn.GaussNewton(nn.Linear(2, 2), nn.MSELoss())
    for name in ("curvature", "inversion", "damping", "step_size", "refresh", "guard"):
        assert getattr(ours, name) == getattr(plain, name)


@pytest.mark.parametrize("curvature", ["kfra", "kflr", "kfac"])
@pytest.mark.parametrize(("ending", "average"), [("", 0.0), ("-ma", 0.9)])
def test_the_papers_methods(curvature: str, ending: str, average: float) -> None:
    made = gauss_newton(curvature + ending, seed=7)
    for name in ("damping", "step_size", "guard"):
        assert getattr(made, name) == gn.PAPER[name]
    assert made.refresh == replace(gn.PAPER["refresh"], decay=average)
    assert (made.refresh.growth, made.refresh.average, made.refresh.last) == (0, 0.95, 0)
    if curvature == "kfac":
        assert isinstance(made.curvature, gn.KFAC)
        assert (made.curvature.samples, made.curvature.seed) == (1, 7)
    else:
        assert made.curvature == curvature


def test_settings_reach_the_optimiser() -> None:
    made = gauss_newton("kfac-ma:weight_decay=1e-5,inversion=exact,tau=3,samples=4")
    assert made.param_groups[0]["weight_decay"] == 1e-5
    assert made.inversion == "exact"
    assert made.damping.tau == 3
    assert made.damping.gamma == "search"
    assert isinstance(made.curvature, gn.KFAC)
    assert made.curvature.samples == 4
    free = optimizer("hessian-free:iterations=9,precondition=yes")
    assert isinstance(free, gn.HessianFree)
    assert (free.iterations, free.precondition) == (9, True)


def test_first_order_methods() -> None:
    groups = {name: optimizer(name).param_groups[0] for name in ("sgd", "momentum", "nesterov")}
    assert {name: (g["momentum"], g["nesterov"]) for name, g in groups.items()} == {
        "sgd": (0, False),
        "momentum": (0.9, False),
        "nesterov": (0.9, True),
    }
    adam = optimizer("adam")
    assert isinstance(adam, torch.optim.Adam)
    assert adam.param_groups[0]["lr"] == 0.001
    assert optimizer("adam:rate=2^-6").param_groups[0]["lr"] == 1 / 64


def test_the_rate_is_halved_every_period() -> None:
    halved = method("sgd:rate=8,decay=3")
    assert [halved.rate(t) for t in range(7)] == [8, 8, 8, 4, 4, 4, 2]
    assert method("sgd:rate=8").rate(10**6) == 8
    assert method("kfra").rate(0) is None


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_says_what_it_is(name: str) -> None:
    assert method(name).text == name
    assert method(name).second_order == (name not in ("sgd", "momentum", "nesterov", "adam"))


@pytest.mark.parametrize(
    ("written", "standard"),
    [
        ("adam:decay=50,rate=0.015625", "adam:rate=2^-6,decay=50"),
        ("adam:rate=0.001", "adam"),
        ("sgd:rate=0.30000000000000004", "sgd:rate=0.30000000000000004"),
        ("hessian-free:precondition=no", "hessian-free"),
    ],
)
def test_one_method_has_one_spelling(written: str, standard: str) -> None:
    assert method(written).text == standard
    assert method(standard).values == method(written).values


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kflr-mi", "no method 'kflr-mi'; did you mean 'kflr-ma'"),
        ("adam:speed=1", "no setting of adam 'speed'.*rate, decay"),
        ("kfra:rate=1", "no setting of kfra 'rate'"),
        ("adam:rate", "'rate' in 'adam:rate' is no setting"),
        ("adam:", "is no setting"),
        ("adam:rate=-1", "rate of adam: '-1' is not above zero"),
        ("adam:rate=nan", "'nan' is not a number"),
        ("adam:rate=0^-1", "is not a number"),
        ("adam:decay=2.5", "'2.5' is not a whole number above zero"),
        ("adam:rate=1,rate=2", "rate is set twice"),
        ("kfra:inversion=fast", "'fast' is neither factored nor exact"),
        ("hessian-free:precondition=1", "'1' is neither yes nor no"),
    ],
)
def test_what_cannot_be_gets_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ExperimentError, match=sentence):
        method(text)


def test_with_settings_checks_names() -> None:
    adam: Method = method("adam:decay=4")
    assert adam.with_settings(rate=0.5).text == "adam:rate=0.5,decay=4"
    with pytest.raises(ExperimentError, match="no setting of adam 'speed'"):
        adam.with_settings(speed=1)
