"""The report in Markdown."""

from __future__ import annotations

import re
from typing import Any

from tabulate import tabulate

from race.defaults import KEY, fingerprint
from race.halving import QUARTER
from race.settings import MEMORIES, OURS, RUNNERS, setting_text
from race.standing import BARS, PEERS, Runs, Standing, Target, standing, targets_of, verdict
from race.store import Line
from race.tasks import JUDGED, TASKS
from race.times import loss_at, median


def _table(rows: list[list[str]], header: list[str]) -> str:
    return tabulate(rows, header, tablefmt="github", disable_numparse=True)


def _seconds(of: Standing | None) -> str:
    """Seconds and updates to a target."""
    if of is None:
        return ""
    if not of.when.ever:
        return f"not in {of.tried:.0f} s"
    return f"{_short(of.when.seconds)} s, {of.when.updates:.0f} updates"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(of: Standing | None, ours: Standing | None) -> str:
    if of is None or ours is None or not ours.when.ever:
        return ""
    return f"{'' if of.when.ever else '> '}{of.ratio(ours):.2g}"


def problem_table(problem: str, runs: Runs) -> str:
    """A row for each runner, with two columns for each target."""
    targets = targets_of(problem, runs)
    ours = {target.name: standing([OURS], runs, target) for target in targets}
    rows = []
    for runner, entry in RUNNERS.items():
        lines = list(runs.get(runner, {}).values())
        if not lines:
            continue
        cells = [entry.title, setting_text(lines[0]["setting"]), *_pace(lines)]
        for target in targets:
            mine = standing([runner], runs, target)
            cells += [_seconds(mine), _ratio(mine, ours[target.name])]
        rows.append(cells)
    shared = min((line["seconds"] for each in runs.values() for line in each.values()), default=0)
    header = ["", "setting", "ms an update", f"loss after {shared:g} s", "judged"]
    for target in targets:
        header += [f"to {target.name}", "× ours"]
    return _table(rows, header)


def _pace(lines: list[Line]) -> list[str]:
    """Milliseconds an update, the loss when the common time was over, and whose loss that is."""
    last = [line["marks"][-1] for line in lines]
    pace = median([1e3 * mark[1] / mark[0] for mark in last if mark[0]])
    # The last update of the common time ends a little after it, or before it if it stopped.
    losses = [loss_at(line["marks"], min(line["seconds"], line["marks"][-1][1])) for line in lines]
    of = sorted({str(mark[3]) for mark in last})
    failed = [line["failure"] for line in lines if line["failure"]]
    return [_short(pace), f"{median(losses):.4g}", ", ".join([*of, *failed])]


def bars_table(problems: dict[str, Runs]) -> str:
    """The bars that were set, and whether they were reached."""
    rows = []
    for bar in BARS:
        runs = problems.get(bar.problem)
        for target in targets_of(bar.problem, runs) if runs else []:
            ours = standing([OURS], runs or {}, target)
            theirs = standing(bar.runners, runs or {}, target)
            if ours is None or theirs is None:
                continue
            who = RUNNERS[theirs.who].title
            against = bar.against if bar.against == who else f"{bar.against} ({who})"
            rows.append([
                f"{TASKS[bar.problem].title}, to {target.name}", against, _seconds(ours),
                _seconds(theirs), _ratio(theirs, ours), f"{bar.factor:g}",
                verdict(ours, theirs, bar.factor),
            ])  # fmt: skip
    header = ["seconds to a loss", "against", "gn.GaussNewton", "theirs", "× ours", "bar", ""]
    return _table(rows, header)


def seeds_table(problem: str, runs: Runs) -> str:
    """Each seed by itself, whose contenders shared the same moments."""
    columns = {"gn.GaussNewton": (OURS,)} | {
        bar.against: bar.runners for bar in BARS if bar.problem == problem
    }
    columns = columns if len(columns) > 1 else columns | {"the best first-order peer": PEERS}
    rows = []
    for target in targets_of(problem, runs):
        for seed, loss in target.of.items():
            alone = Target(f"{loss:.4g}", {seed: loss})
            found = {title: standing(who, runs, alone) for title, who in columns.items()}
            ours, *theirs = found.values()
            if ours is None:
                continue
            cells = [alone.name, str(seed), _seconds(ours)]
            for each in theirs:
                who = f"{RUNNERS[each.who].title}: " if each else ""
                cells += [f"{who}{_seconds(each)}", _ratio(each, ours)]
            rows.append(cells)
    header = ["loss", "seed", "gn.GaussNewton"]
    for title in list(columns)[1:]:
        header += [title, "× ours"]
    return _table(rows, header)


def mixed_text(runs: Runs, present: str) -> str:
    """A warning where seeds of ours raced with different settings, or with others than now.

    Args:
        runs: of one problem.
        present: the fingerprint of the settings of now.
    """
    by_settings: dict[str, list[str]] = {}
    for seed, line in sorted(runs.get(OURS, {}).items()):
        key = (line.get("versions") or {}).get(KEY, "others, not noted")
        by_settings.setdefault(key, []).append(str(seed))
    if by_settings.keys() <= {present}:
        return ""
    if len(by_settings) == 1:
        return f"**Raced with earlier defaults of gn.GaussNewton** ({next(iter(by_settings))})."
    each = "; ".join(f"{key}: seeds {', '.join(seeds)}" for key, seeds in by_settings.items())
    return f"**Medians mix several defaults of gn.GaussNewton** ({each})."


def grids_table(problems: dict[str, Runs], asked: list[dict[str, Any]]) -> str:
    """What was searched on each problem, by all commands for it together."""
    rows = []
    for runner, entry in RUNNERS.items():
        grids: dict[tuple[str, str], list[str]] = {}
        for name in (name for name, runs in problems.items() if runner in runs):
            own = [e for e in asked if _names(e, "problems", name) and _names(e, "runners", runner)]
            limited = entry.limited(_all_of(own, "powers"), _all_of(own, "decays"))
            key = limited.grid_text(), str(len(limited.grid()))
            grids.setdefault(key, []).append(TASKS[name].title)
        rows += [
            [entry.title, ", ".join(titles), *grid, entry.about] for grid, titles in grids.items()
        ]
    return _table(rows, ["", "on", "grid", "settings", "otherwise"])


def _names(asked: dict[str, Any], option: str, word: str) -> bool:
    """Whether a command was about a problem or runner; without the option it is about all.

    >>> command = {"command": "race.py --problems mnist faces --runners soap --seeds 1"}
    >>> [_names(command, "problems", name) for name in ("faces", "curves")]
    [True, False]
    >>> _names({"command": "race.py --seeds 1"}, "problems", "curves")
    True
    """
    found = re.search(rf"--{option}((?: [a-z][\w-]*)+)", asked["command"])
    return found is None or word in found[1].split()


def _all_of(asked: list[dict[str, Any]], key: str) -> list[Any]:
    """What any of the commands was limited to; nothing if one of them had no limit."""
    limits = [each[key] for each in asked]
    return sorted({value for limit in limits for value in limit}) if all(limits) else []


def _numbers(asked: list[dict[str, Any]], key: str, factor: float = 1.0) -> str:
    """A budget as it was in each command.

    >>> _numbers([{"race": 40.0}, {"race": 60.0}, {"race": 60.0}], "race")
    '40 or 60'
    """
    return " or ".join(f"{factor * value:g}" for value in sorted({each[key] for each in asked}))


def method_text(asked: list[dict[str, Any]]) -> str:
    """How it was measured."""
    facts = asked[-1]
    memories = ", ".join(f"{m:g}" for m in MEMORIES)
    return (
        f"All contenders of a problem and seed start from the same parameters, see the same "
        f"batches in the same order, and take turns of at most {facts['turn']:g} s in a shuffled "
        f"order, in one process ({facts['threads']} threads of torch; kfac-jax in a child with as "
        "many cores). Counted are the seconds of updates: not the making of batches, the judging, "
        "the peers' running means, first calls and compilation. Losses are of "
        f"{JUDGED:,} training data, the same everywhere; ours with its own averaged parameters, a "
        f"peer's with the best, at each mark, of its parameters and three running means of them "
        f"(memories {memories}). Seconds and updates to a loss are interpolated between marks "
        "(a tenth of the seconds apart or less, by the logarithm of the loss); medians over the "
        "seeds; a seed that "
        "did not reach a loss counts as infinite.\n\n"
        "Each peer has the best setting of its grid, by successive halving on seed 0: "
        f"{_numbers(asked, 'search')} s each, the best quarter "
        f"{_numbers(asked, 'search', QUARTER)} s each, and the best of those races; a command with "
        "one rate takes what an earlier search or race found. Decay periods are shares of the "
        "run's own budget. "
        f"Each contender has {_numbers(asked, 'race')} s. On the "
        "autoencoders the first-order peer that is best then goes on to "
        f"{_numbers(asked, 'long')} s at most (with --give-up, to so many times our seconds), and "
        "beside it gn.GaussNewton and kfac-jax as far as they need to reach the loss in question."
    )


def report(problems: dict[str, Runs], asked: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """All of it.

    Args:
        problems: the runs by problem, runner and seed.
        asked: the command and the budgets of each session that led to them, the last one last.
        versions: of everything.
    """
    commands = ", ".join(dict.fromkeys(f"`{each['command']}`" for each in asked))
    about = "\n".join(f"- {name}: `{value}`" for name, value in versions.items())
    parts = [
        "# The race", f"Written by {commands}.", about, method_text(asked),
    ]  # fmt: skip
    if any(bar.problem in problems for bar in BARS):
        parts += ["## The bars", bars_table(problems)]
    for name, runs in problems.items():
        task = TASKS[name]
        seeds = sorted({seed for lines in runs.values() for seed in lines})
        text = f"Loss: {task.shown}. Batches of {task.batch}; seeds {', '.join(map(str, seeds))}."
        origins = [
            f"Each seed's own loss to reach is {target.origin}; {target.name} is the median."
            for target in targets_of(name, runs)
            if target.origin
        ]
        parts += [f"## {task.title}", " ".join([text, *origins]), problem_table(name, runs)]
        parts += [mixed_text(runs, fingerprint()), "Seed by seed:", seeds_table(name, runs)]
    parts += ["## The grids", grids_table(problems, asked)]
    parts = [part for part in parts if part]
    return "\n\n".join(parts) + "\n"
