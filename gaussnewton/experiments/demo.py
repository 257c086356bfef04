"""A first look: the paper's CURVES autoencoder, by ``gn.GaussNewton`` and by Adam."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from gaussnewton.diagnostics import verify
from gaussnewton.experiments.config import Config, configure
from gaussnewton.experiments.extra import require
from gaussnewton.experiments.figures import FIGURES
from gaussnewton.experiments.figures.progress import final_loss
from gaussnewton.experiments.live import Bar, Lines, watcher
from gaussnewton.experiments.problems import Data, problem
from gaussnewton.experiments.record import Line, Result
from gaussnewton.experiments.report import report
from gaussnewton.experiments.stopping import Stopped, stopping
from gaussnewton.experiments.training import Training, due

EVALUATED = 2000
"""So many of the training data: with all 10,000 a third of the time would be spent evaluating."""

LONGEST = 1.2
"""A method ends after so many times its seconds in all, evaluation included, on a busy machine."""

ADAM, OURS = "adam:rate=0.001", "default"
DRAWN = {
    ADAM: ("Adam 1e-3", "adam", "adam"),
    OURS: ("gn.GaussNewton", "gaussnewton", "gaussnewton"),
}
"""Titles, lines and names."""


def demo(
    seconds: float = 40.0, seed: int = 0, out: str | Path = "demo-results", name: str = "curves"
) -> dict[str, Any]:
    """Train the paper's CURVES autoencoder by Adam and by our default, and make a page of it.

    Args:
        seconds: in the updates of each of the two; a fifth more with evaluation, at most.
        seed: of the network and the batches.
        out: the folder for the figure and the page, ``index.html``.
        name: another autoencoder of :data:`~gaussnewton.experiments.problems.PROBLEMS`.

    Returns:
        The figure's result.

    Raises:
        Stopped: after Ctrl-C.

    Example:
        >>> import contextlib, io, tempfile, gaussnewton.experiments.demo
        >>> with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        ...     result = gaussnewton.experiments.demo.demo(seconds=0.1, out=out, name="tiny")
        >>> [run["title"] for run in result["problems"][0]["runs"]]
        ['Adam 1e-3', 'gn.GaussNewton']
    """
    for module in ("matplotlib", "jinja2"):
        require(module, "the demonstration")
    what, shown = problem(name), watcher()
    print(
        f"{what.title}, {what.architecture()}, batches of {what.batch}:\n"
        f"{seconds:g} s of updates by Adam and by gn.GaussNewton, which has nothing to tune.\n"
        f"Loss: {what.shown}.\n",
        flush=True,
    )
    data = what.data(None)
    configs = {text: configure(name, text, seed=seed, seconds=seconds) for text in DRAWN}
    lines = {text: _train(config, data, shown) for text, config in configs.items()}
    runs = [_drawn(text, found) for text, found in lines.items()]
    print(f"\n{_comparison(*runs)}\n\nThe curvature of a small network, beside plain autograd:\n")
    _verify(seed)
    kind = FIGURES["curves"]
    result = kind.compute(
        [{"title": what.title, "runs": runs}],
        budget=f"at most {seconds:g} s of updates a method",
        note=f"The loss is that of {EVALUATED:,} training images; for gn.GaussNewton with averaged "
        "parameters.",
    )
    kind.save(result, out)
    page = report(out, title="gaussnewton: a first look", claims=())
    print(f"\nThe page: {page}")
    return result


def _train(config: Config, data: Data, shown: Bar | Lines) -> list[Line]:
    """A run as the experiments have it, evaluated on fewer data and recorded nowhere."""
    training = Training(config, data)
    x, y = training.evaluated
    training.evaluated = x[:EVALUATED], y[:EVALUATED]
    shown.begin(config, 0, 0.0)
    lines = [training.start() | training.evaluate()]
    assert config.seconds is not None
    latest = time.monotonic() + LONGEST * config.seconds
    with stopping() as stop:
        over = False
        while not stop.asked and not over:
            line = training.step()
            over = config.spent(training.update, training.seconds) or time.monotonic() > latest
            if due(training.update) or over:
                line |= training.evaluate()
                lines.append(line)
            shown.line(line)
        status = "stopped" if stop.asked else "finished"
    last = lines[-1]
    shown.end(
        Result(status, training.update, training.seconds, last["loss"], last.get("averaged_loss"))
    )
    if status == "stopped":
        raise Stopped
    return lines


def _drawn(text: str, lines: list[Line]) -> dict[str, Any]:
    title, style, method = DRAWN[text]
    points = [[at["update"], at["seconds"], at.get("averaged_loss", at["loss"])] for at in lines]
    setting = "default" if method == "adam" else ""
    return {"title": title, "style": style, "method": method, "setting": setting,
            "points": points, "window": 1}  # fmt: skip


def _comparison(adam: dict[str, Any], ours: dict[str, Any]) -> str:
    """When ours was where Adam ended."""
    theirs, end = final_loss(adam), adam["points"][-1]
    there = next((p for p in ours["points"] if p[2] <= theirs), None)
    if there is None:
        return f"Adam ends at {theirs:.4g}, gn.GaussNewton at {final_loss(ours):.4g}."
    return (
        f"Adam ends at {theirs:.4g}, after {end[0]} updates and {end[1]:.1f} s. gn.GaussNewton is "
        f"there\nafter {there[0]} updates and {there[1]:.1f} s, and ends at {final_loss(ours):.4g}."
    )


def _verify(seed: int) -> None:
    small = problem("tiny")
    x, _ = small.data(None)
    x = x[:100].double()
    verify(small.network(seed).double(), small.criterion(), (x, x), ["kflr", "kfra"])
