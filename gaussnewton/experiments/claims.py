"""What the paper claims, and whether the numbers measured here bear it out.

A claim's test is a function of measured results, by the names under which they were saved: those
of :mod:`gaussnewton.experiments.figures`. Each says precisely what is compared. A claim that is
about several data sets is held only where all of them were measured and agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from gaussnewton.experiments.figures.progress import smoothed, window_of

Outcome = Literal["held", "not held", "not measured"]
Results = Mapping[str, dict[str, Any]]
Run = dict[str, Any]

DATA_SETS = ("curves", "faces", "mnist")
SECOND_ORDER = ("kfra", "kfac")
KINDS = ("layers", "whole")
MOST_RESIDUAL = 0.1
"""Of a reference step that may be compared with."""


@dataclass(frozen=True)
class Verdict:
    """What was found of a claim: an outcome, and the numbers in a sentence."""

    outcome: Outcome
    sentence: str


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, where it stands, and its test.

    Example:
        >>> from gaussnewton.experiments.claims import CLAIMS
        >>> CLAIMS[0].judge({}).outcome
        'not measured'
    """

    statement: str
    where: str
    test: Callable[[Results], Verdict]

    def judge(self, results: Results) -> Verdict:
        """The verdict on results that were measured, by name."""
        return self.test(results)


def beats_adam_by_update(results: Results) -> Verdict:
    """KFRA and KFAC each reach a lower loss than tuned Adam after the same number of updates.

    On each of the three data sets: U is the last update that all three have, the loss of a run
    at U that of its last point up to U (the mean of its last ten, where losses are those of
    batches), that of a method the lowest of its runs. Held
    if both methods' losses are lower than that of the Adam run with setting "tuned", everywhere.
    """
    return _everywhere(results, lambda result: _against_adam(result, column=0))


def beats_adam_by_second(results: Results) -> Verdict:
    """As :func:`beats_adam_by_update`, after the same number of seconds."""
    return _everywhere(results, lambda result: _against_adam(result, column=1))


def kfra_beats_kfac(results: Results) -> Verdict:
    """KFRA reaches a lower loss than KFAC, by update and by second, on all three data sets.

    Losses at the last update, and at the last second, that both have, as in
    :func:`beats_adam_by_update`.
    """

    def test(result: dict[str, Any]) -> tuple[bool, str] | None:
        kfra, kfac = (_runs(result, method) for method in SECOND_ORDER)
        if not kfra or not kfac:
            return None
        held, parts = True, []
        for column, unit in ((0, "updates"), (1, "s")):
            end = min(_end(kfra, column), _end(kfac, column))
            a, b = _best(kfra, end, column), _best(kfac, end, column)
            held &= a < b
            parts.append(f"{_number(a)} against {_number(b)} after {end:.4g} {unit}")
        return held, ", ".join(parts)

    return _everywhere(results, test)


def kfra_aligns_better(results: Results) -> Verdict:
    """KFRA's steps have a higher cosine with exact Gauss-Newton steps than KFAC's.

    For every measured trajectory and both inversions: the mean over its points, and over layers,
    of the cosine with the block-diagonal step; and the mean over its points of the cosine of the
    whole vector with the full step. Held if each of these means is higher for KFRA. Points whose
    reference step has a relative residual above 0.1 are left out: a cosine with a step that is
    not the exact one tells nothing. A trajectory with no point left was not measured.
    """
    found = [(name, r) for name, r in results.items() if r.get("figure") == "alignment"]
    held, sentences, measured = True, [], 0
    for name, result in found:
        parts = _alignments(result)
        measured += bool(parts)
        held &= all(better for better, _ in parts)
        said = "; ".join(sentence for _, sentence in parts) or "no reference step converged"
        left_out = sum(r > MOST_RESIDUAL for key in KINDS for r in _residuals(result, key))
        if parts and left_out:
            said += f"; {left_out} reference steps did not converge and are left out"
        sentences.append(f"{result.get('title') or name}: {said}.")
    if not measured:
        none = "No alignment of KFRA and KFAC was measured."
        return Verdict("not measured", " ".join([none, *sentences]))
    return Verdict("held" if held else "not held", " ".join(sentences))


def _alignments(result: dict[str, Any]) -> list[tuple[bool, str]]:
    """For each inversion whether KFRA is better on both counts, and the numbers."""
    good = {key: [r <= MOST_RESIDUAL for r in _residuals(result, key)] for key in KINDS}
    steps = [[f"{method}{star}" for method in SECOND_ORDER] for star in ("", "*")]
    if not all(any(each) for each in good.values()):
        return []
    found = []
    for pair in steps:
        if all(step in result["whole"] for step in pair):
            layers = [
                fmean(_mean(cosines[step], good["layers"]) for cosines in result["layers"].values())
                for step in pair
            ]
            whole = [_mean(result["whole"][step], good["whole"]) for step in pair]
            sentence = (
                f"{'factored' if pair[0].endswith('*') else 'exact'} inversion: layers "
                f"{layers[0]:.3f} against {layers[1]:.3f}, whole {whole[0]:.3f} against "
                f"{whole[1]:.3f}"
            )
            found.append((layers[0] > layers[1] and whole[0] > whole[1], sentence))
    return found


def _residuals(result: dict[str, Any], key: str) -> list[float]:
    return [math.inf if r is None else float(r) for r in result["residuals"][key]]


def kfac_like_kflr(results: Results) -> Verdict:
    """On the mixture, KFAC's loss stays near KFLR's all along.

    At the updates that both have, with losses averaged as they are drawn: the median of
    |ln(KFAC / KFLR)| is at most a tenth of ln(first / last) of KFLR, the progress it makes. Of
    several runs of a method, that which ends lowest.
    """
    result = results.get("mixture")
    pair = [_runs(result, method) for method in ("kfac", "kflr")] if result else []
    if len(pair) < 2 or not all(pair):
        return Verdict("not measured", "KFAC and KFLR were not both run on the mixture.")
    kfac, kflr = (
        {p[0]: p[2] for p in smoothed(run["points"], window_of(run)) if p[2] > 0}
        for run in (min(runs, key=_last) for runs in pair)
    )
    shared = sorted(kfac.keys() & kflr.keys())
    if len(shared) < 2:
        return Verdict("not measured", "KFAC and KFLR share no updates on the mixture.")
    progress = math.log(kflr[shared[0]] / kflr[shared[-1]])
    distance = median(abs(math.log(kfac[u] / kflr[u])) for u in shared)
    return Verdict(
        "held" if distance <= 0.1 * progress else "not held",
        f"Over {len(shared)} points the two differ by a factor of {math.exp(distance):.3g} "
        f"(median), while KFLR's loss falls by a factor of {math.exp(progress):.3g}; after "
        f"{shared[-1]:.0f} updates KFAC is at {_number(kfac[shared[-1]])} and KFLR at "
        f"{_number(kflr[shared[-1]])}.",
    )


def adam_struggles_on_faces(results: Results) -> Verdict:
    """Adam at its default rate of 1e-3 diverges on FACES, or stays far behind tuned Adam.

    Held if the run with setting "default" ends without a number, or above the loss it began
    with, or at twice the loss of the run with setting "tuned" or more, at the last update that
    both have.
    """
    result = results.get("faces")
    default = _runs(result, "adam", "default") if result else []
    tuned = _runs(result, "adam", "tuned") if result else []
    if not default or not tuned:
        return Verdict("not measured", "Adam was not run on FACES both at 1e-3 and tuned.")
    end = min(_end(default, 0), _end(tuned, 0))
    a, b = _best(default, end, 0), _best(tuned, end, 0)
    start = smoothed(default[0]["points"][:1])[0][2]
    held = not math.isfinite(a) or a > start or a >= 2 * b
    return Verdict(
        "held" if held else "not held",
        f"After {end:.4g} updates Adam 1e-3 is at {_number(a)}, from {_number(start)}; tuned Adam "
        f"is at {_number(b)}.",
    )


def no_smooth_maxima(results: Results) -> Verdict:
    """No smooth local maximum on the drawn surfaces, nor along random directions in one layer.

    Held if there are no strict maxima at smooth points, of which there must be at least a
    hundred, and no direction within one layer along which E is concave at a smooth point.
    """
    result = results.get("surface")
    if result is None:
        return Verdict("not measured", "The error surface was not computed.")
    grid, lines = result["total"], result["directions"]
    none = grid["maxima_smooth"] == lines["maxima_smooth"] == lines["concave_smooth"] == 0
    if grid["smooth"] < 100 or lines["smooth"] < 100:
        return Verdict("not measured", "There are fewer than a hundred smooth points.")
    return Verdict(
        "held" if none else "not held",
        f"{grid['maxima_smooth']} maxima at {grid['smooth']:,} smooth grid points; along "
        f"{lines['smooth']:,} smooth directions {lines['maxima_smooth']} maxima and "
        f"{lines['concave_smooth']} concave points. At kinks: {grid['maxima_kinks']} and "
        f"{lines['maxima_kinks']} maxima.",
    )


def rank_is_bounded(results: Results) -> Verdict:
    """No numerical rank of a Monte-Carlo curvature matrix exceeds the bound of appendix D."""
    result = results.get("rank")
    if result is None:
        return Verdict("not measured", "No rank was computed.")
    return Verdict(
        "held" if result["violations"] == 0 else "not held",
        f"{result['violations']} of {result['checked']} ranks exceed their bound.",
    )


CLAIMS = (
    Claim(
        "The second-order methods outperform tuned Adam per update on all three data sets.",
        "section 5.1, figure 2",
        beats_adam_by_update,
    ),
    Claim(
        "They outperform tuned Adam per CPU second on all three data sets.",
        "section 5.1; appendix F.1",
        beats_adam_by_second,
    ),
    Claim(
        "KFRA is noticeably faster than KFAC, per iteration and by wall-clock.",
        "section 5.1",
        kfra_beats_kfac,
    ),
    Claim(
        "KFRA's updates are better aligned with the exact Gauss-Newton updates than KFAC's.",
        "section 5.1, appendix F.2",
        kfra_aligns_better,
    ),
    Claim(
        "KFAC performs almost identically to KFLR on the mixture.", "section 5.2", kfac_like_kflr
    ),
    Claim(
        "Adam with the default rate of 1e-3 diverges on FACES.",
        "section 5.1",
        adam_struggles_on_faces,
    ),
    Claim(
        "The error surface of a ReLU network has no smooth local maxima.",
        "section 2.2.3, figure 1",
        no_smooth_maxima,
    ),
    Claim(
        "The rank of the Monte-Carlo Gauss-Newton matrix is bounded by N · rank(H_L), that of the "
        "sampled Fisher matrix by N S.",
        "section 6, appendix D",
        rank_is_bounded,
    ),
)
"""The claims that are looked into, in the order of the report."""


def _everywhere(
    results: Results, test: Callable[[dict[str, Any]], tuple[bool, str] | None]
) -> Verdict:
    """One test on each data set: not held if it fails on any, held if all were measured."""
    found = {name: test(results[name]) if name in results else None for name in DATA_SETS}
    sentences = [
        f"{name.upper()}: {'not measured' if part is None else part[1]}."
        for name, part in found.items()
    ]
    known = [part[0] for part in found.values() if part is not None]
    if not known:
        return Verdict("not measured", "None of the three data sets was measured.")
    outcome: Outcome = "held" if len(known) == len(DATA_SETS) else "not measured"
    return Verdict(outcome if all(known) else "not held", " ".join(sentences))


def _against_adam(result: dict[str, Any], column: int) -> tuple[bool, str] | None:
    adam = _runs(result, "adam", "tuned")
    ours = {method: _runs(result, method) for method in SECOND_ORDER}
    if not adam or not all(ours.values()):
        return None
    end = min(_end(runs, column) for runs in (adam, *ours.values()))
    losses = {method: _best(runs, end, column) for method, runs in ours.items()}
    theirs = _best(adam, end, column)
    numbers = ", ".join(f"{method.upper()} {_number(v)}" for method, v in losses.items())
    unit = "updates" if column == 0 else "s"
    sentence = f"after {end:.4g} {unit} {numbers}, Adam {_number(theirs)}"
    return all(v < theirs for v in losses.values()), sentence


def _runs(result: dict[str, Any], method: str, setting: str | None = None) -> list[Run]:
    return list(_matching(result, method, setting))


def _matching(result: dict[str, Any], method: str, setting: str | None) -> Iterator[Run]:
    for problem in result["problems"]:
        for run in problem["runs"]:
            fits = setting is None or run.get("setting") == setting
            if run.get("method") == method and fits:
                yield run


def _end(runs: list[Run], column: int) -> float:
    """The last update or second up to which all of the runs go."""
    return min(float(run["points"][-1][column]) for run in runs)


def _best(runs: list[Run], end: float, column: int) -> float:
    return min(_loss_at(run, end, column) for run in runs)


def _loss_at(run: Run, end: float, column: int) -> float:
    """The averaged loss of a run at an update or second; infinite if it is no number."""
    points = [p for p in run["points"] if p[column] <= end]
    value = smoothed(points, window_of(run))[-1][2] if points else math.inf
    return value if math.isfinite(value) else math.inf


def _last(run: Run) -> float:
    return _loss_at(run, math.inf, 0)


def _mean(values: list[float | None], kept: list[bool]) -> float:
    known = [v for v, keep in zip(values, kept, strict=True) if keep and v is not None]
    return fmean(known) if known else math.nan


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "no number"
