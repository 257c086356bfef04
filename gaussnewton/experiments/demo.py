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
from gaussnewton.experiments.problems import Data, Problem, problem
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
        Stopped: after Ctrl-C. It says what is saved: the figure and the page of what was measured,
            if both methods had begun.

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
    runs, stopped = _runs(configs, data, shown)
    budget = f"at most {seconds:g} s of updates a method"
    if stopped:
        if len(runs) < len(DRAWN):
            raise Stopped("Nothing is saved: gn.GaussNewton had not begun.")
        _, page = _save(what, runs, f"{budget}, stopped before", out)
        raise Stopped(f"The page of what was measured: {page}")
    print(f"\n{_comparison(*runs)}\n\nThe curvature of a small network, beside plain autograd:\n")
    _verify(seed)
    result, page = _save(what, runs, budget, out)
    print(f"\nThe page: {page}")
    return result


def _runs(
    configs: dict[str, Config], data: Data, shown: Bar | Lines
) -> tuple[list[dict[str, Any]], bool]:
    """One after the other, as a figure wants them, and whether somebody asked to stop."""
    runs = []
    for text, config in configs.items():
        lines, stopped = _train(config, data, shown)
        runs.append(_drawn(text, lines))
        if stopped:
            return runs, True
    return runs, False


def _save(
    what: Problem, runs: list[dict[str, Any]], budget: str, out: str | Path
) -> tuple[dict[str, Any], Path]:
    """The figure and the page; returns the figure's result, and where the page is."""
    kind = FIGURES["curves"]
    result = kind.compute(
        [{"title": what.title, "runs": runs}],
        budget=budget,
        note=f"The loss is that of {EVALUATED:,} training images; for gn.GaussNewton with averaged "
        "parameters.",
    )
    kind.save(result, out)
    return result, report(out, title="gaussnewton: a first look", claims=())


def _train(config: Config, data: Data, shown: Bar | Lines) -> tuple[list[Line], bool]:
    """A run as the experiments have it, evaluated on fewer data and recorded nowhere.

    Also says whether somebody asked to stop it.
    """
    training = Training(config, data)
    x, y = training.evaluated
    training.evaluated = x[:EVALUATED], y[:EVALUATED]
    shown.begin(config, 0, 0.0)
    lines = [training.start() | training.evaluate()]
    assert config.seconds is not None
    latest = time.monotonic() + LONGEST * config.seconds
    with stopping() as stop:
        over = False
        while not over:
            line = training.step()
            late = stop.asked or time.monotonic() > latest
            over = late or config.spent(training.update, training.seconds)
            if due(training.update) or over:
                line |= training.evaluate()
                lines.append(line)
            shown.line(line)
        stopped = stop.asked
    last, status = lines[-1], "stopped" if stopped else "finished"
    shown.end(
        Result(status, training.update, training.seconds, last["loss"], last.get("averaged_loss"))
    )
    return lines, stopped


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
