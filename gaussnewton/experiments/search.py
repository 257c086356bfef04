"""The paper's search for the best first-order method (section 5.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from gaussnewton.errors import BusyError, ExperimentError
from gaussnewton.experiments.config import Config
from gaussnewton.experiments.methods import Method, method
from gaussnewton.experiments.problems import Data
from gaussnewton.experiments.record import CONFIG, Result, Run, read_run, read_runs
from gaussnewton.experiments.run import Watcher, train

SEARCHED = ("sgd", "momentum", "nesterov", "adam")
RATES = tuple(2.0**-power for power in range(6, 14))
DECAYS = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Decay periods, as shares of the number of updates."""


def grid(
    updates: int,
    methods: Sequence[str] = SEARCHED,
    rates: Sequence[float] = RATES,
    decays: Sequence[float] = DECAYS,
) -> list[Method]:
    """The settings to try: every method with every rate and every decay period.

    Args:
        updates: of each run.
        methods: first-order ones, by name.
        rates: 2^-6 to 2^-13 in the paper.
        decays: shares of ``updates`` after which the rate is halved; 1 means never.

    Raises:
        ExperimentError: if a method has no learning rate, or a share is not above 0 and up to 1.

    Example:
        >>> from gaussnewton.experiments.search import grid
        >>> len(grid(40_000))
        160
        >>> [each.text for each in grid(1000, ["adam"], [0.25], [1.0, 0.5])]
        ['adam:rate=0.25,decay=1000', 'adam:rate=0.25,decay=500']
    """
    wrong = [share for share in decays if not 0 < share <= 1]
    if wrong:
        raise ExperimentError(
            f"a decay period is a share of the updates, above 0 and up to 1, not {wrong[0]:g}."
        )
    found = [method(name) for name in methods]
    for each in found:
        if each.second_order:
            raise ExperimentError(f"{each.name} has no learning rate to search for.")
    return list(
        {
            setting.text: setting
            for each in found
            for rate in rates
            for share in decays
            for setting in [each.with_settings(rate=rate, decay=max(1, round(share * updates)))]
        }.values()
    )


def folder_name(config: Config) -> str:
    """What a run's folder is called among others.

    Example:
        >>> from gaussnewton.experiments.config import configure
        >>> from gaussnewton.experiments.search import folder_name
        >>> folder_name(configure("tiny", "adam:rate=0.5", seed=3))
        'adam,rate=0.5,seed=3'
    """
    name = config.method.replace(":", ",")
    return name if config.seed == 0 else f"{name},seed={config.seed}"


def search(
    configs: Iterable[Config],
    folder: str | Path,
    *,
    data: Callable[[], Data] | None = None,
    save_every: float = 60.0,
    watcher: Watcher | None = None,
) -> Iterator[Result]:
    """Run each of many, one after the other, each in its own folder below one.

    Ended runs are not repeated, those stopped go on, and those that another process is at work
    on are left to it, so that several processes can share a search. It ends early if a run is
    stopped by Ctrl-C. Checkpoints of ended runs are not kept.

    Yields:
        The result of each run, also of those that had ended before.
    """
    for config in configs:
        try:
            result = train(
                config,
                Path(folder) / folder_name(config),
                data=data,
                save_every=save_every,
                keep_checkpoint=False,
                watcher=watcher,
            )
        except BusyError:
            continue
        yield result
        if result.status == "stopped":
            return


def ranked(folder: str | Path, asked: Sequence[Config] | None = None) -> list[Run]:
    """The ended runs below a folder, the least final loss first, diverged ones last.

    Args:
        folder: of a search.
        asked: only these, each as far as it is asked for; one that was recorded with another
            budget may have come further, or not so far. By default all there are, as they are.
    """
    runs = read_runs(folder) if asked is None else _found(Path(folder), asked)
    ended = [(run.result.score, run) for run in runs if run.result is not None]
    return [run for _, run in sorted(ended, key=lambda pair: pair[0])]


def _found(folder: Path, asked: Sequence[Config]) -> list[Run]:
    places = {folder / folder_name(config): config for config in asked}
    return [
        read_run(path).as_asked(config)
        for path, config in places.items()
        if (path / CONFIG).exists()
    ]
