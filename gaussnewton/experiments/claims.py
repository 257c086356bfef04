"""What the paper claims, and whether the numbers measured here bear it out.

A claim's test is a function of measured results, by the names under which they were saved: those
of :mod:`gaussnewton.experiments.figures`. Each says precisely what is compared. A claim that is
about several data sets is held only where all of them were measured and agree.

Runs are compared at one moment. Losses are known at marks that grow apart, and at the end of each
run, which is its own: so by update that moment is the last mark that all of them have, and by
second losses are interpolated. A run that diverged has an infinite loss and does not set the
moment: else one bad variant would have all others judged by their first few updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from gaussnewton.experiments.figures.progress import final_loss, smoothed, window_of

Outcome = Literal["held", "not held", "not measured"]
Results = Mapping[str, dict[str, Any]]
Run = dict[str, Any]
Found = tuple[bool | None, str]
"""Of one data set: whether the claim is true there, None if that cannot be told; in words."""

DATA_SETS = ("curves", "faces", "mnist")
SECOND_ORDER = ("kfra", "kfac")
KINDS = ("layers", "whole")
MOST_RESIDUAL = 0.1
"""Of a reference step that may be compared with."""

NOTICEABLE = 0.05
"""Of the other method's loss: by so much one must be lower to be noticeably faster."""

ALIKE = 1.25
"""The largest factor between losses that are almost identical."""

OUTCOMES: dict[bool | None, Outcome] = {True: "held", False: "not held", None: "not measured"}
UNITS = ("updates", "s")
MISSING = "not measured"


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

    On each of the three data sets: U is the last update after which every run of the three was
    evaluated, the loss of a run that at U (the mean of its last ten, where losses are those of
    batches), that of a method the lowest of its runs. Runs that diverged have an infinite loss
    and have no say in U. Held if both methods' losses are lower than that of the Adam run with
    setting "tuned", everywhere.
    """
    return _everywhere(results, lambda result: _against_adam(result, column=0))


def beats_adam_by_second(results: Results) -> Verdict:
    """As :func:`beats_adam_by_update`, after the same number of seconds.

    These are the seconds of the shortest run that did not diverge. Between two points of a run
    its log loss is taken to be linear in time.
    """
    return _everywhere(results, lambda result: _against_adam(result, column=1))


def kfra_beats_kfac(results: Results) -> Verdict:
    """KFRA reaches a noticeably lower loss than KFAC, by update and by second, everywhere.

    Losses at the last update, and at the last second, that all runs of both have, as in
    :func:`beats_adam_by_update`. Noticeably lower: by 5 % or more of KFAC's.
    """

    def test(result: dict[str, Any]) -> Found:
        kfra, kfac = (_runs(result, method) for method in SECOND_ORDER)
        if not kfra or not kfac:
            return None, MISSING
        found = [_noticeably(kfra, kfac, column) for column in range(len(UNITS))]
        return _all(lower for lower, _ in found), ", ".join(said for _, said in found)

    return _everywhere(results, test)


def _noticeably(kfra: list[Run], kfac: list[Run], column: int) -> Found:
    """Whether KFRA's loss is noticeably below KFAC's at the last moment that all have."""
    end = _moment([*kfra, *kfac], column)
    if end is None:
        return None, _apart(column)
    a, b = _best(kfra, end, column), _best(kfac, end, column)
    most = (1 - NOTICEABLE) * b
    sentence = f"{_loss(kfra, a)} against {_loss(kfac, b)} {_after(end, column)}".rstrip()
    if math.isfinite(most):
        sentence += f" (noticeably lower: {_number(most)} or less)"
    return a < b and a <= most, sentence


def kfra_aligns_better(results: Results) -> Verdict:
    """KFRA's steps have a higher cosine with exact Gauss-Newton steps than KFAC's.

    For the trajectories of the three data sets and both inversions: the mean over its points, and
    over layers, of the cosine with the block-diagonal step; and the mean over its points of the
    cosine of the whole vector with the full step. Held if each of these means is higher for KFRA,
    everywhere. Points whose reference step has a relative residual above 0.1 are left out: a
    cosine with a step that is not the exact one tells nothing. A trajectory with no point left
    was not measured.
    """
    return _everywhere(results, _aligned, prefix="alignment-")


def _aligned(result: dict[str, Any]) -> Found:
    parts = _alignments(result)
    if not parts:
        return None, "no reference step converged"
    said = "; ".join(sentence for _, sentence in parts)
    left_out = sum(r > MOST_RESIDUAL for key in KINDS for r in _residuals(result, key))
    if left_out:
        said += f"; {left_out} reference steps did not converge and are left out"
    return all(better for better, _ in parts), said


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
    |ln(KFAC / KFLR)| is at most a tenth of ln(first / last) of KFLR, the progress it makes, and
    at most ln 1.25. Of several runs of a method, that which ends lowest; not held if a method has
    none that did not diverge.
    """
    result = results.get("mixture")
    pair = [_runs(result, method) for method in ("kfac", "kflr")] if result else []
    if len(pair) < 2 or not all(pair):
        return Verdict("not measured", "KFAC and KFLR were not both run on the mixture.")
    best = [min(runs, key=final_loss) for runs in pair]
    lost = [run["method"].upper() for run in best if _diverged(run)]
    if lost:
        return Verdict("not held", f"{' and '.join(lost)} diverged on the mixture.")
    kfac, kflr = (
        {p[0]: p[2] for p in smoothed(run["points"], window_of(run)) if p[2] > 0} for run in best
    )
    shared = sorted(kfac.keys() & kflr.keys())
    if len(shared) < 2:
        return Verdict("not measured", "KFAC and KFLR share no updates on the mixture.")
    progress = math.log(kflr[shared[0]] / kflr[shared[-1]])
    distance = median(abs(math.log(kfac[u] / kflr[u])) for u in shared)
    return Verdict(
        "held" if distance <= min(0.1 * progress, math.log(ALIKE)) else "not held",
        f"Over {len(shared)} points the two differ by a factor of {math.exp(distance):.3g} "
        f"(median), while KFLR's loss falls by a factor of {math.exp(progress):.3g}; after "
        f"{shared[-1]:.0f} updates KFAC is at {_loss(pair[0], kfac[shared[-1]])} and KFLR at "
        f"{_loss(pair[1], kflr[shared[-1]])}.",
    )


def adam_struggles_on_faces(results: Results) -> Verdict:
    """Adam at its default rate of 1e-3 diverges on FACES, or stays far behind tuned Adam.

    Held if the run with setting "default" ends without a number, or above the loss it began
    with, or at twice the loss of the run with setting "tuned" or more, at the last update that
    both have; where it diverged, the sentence says so.
    """
    result = results.get("faces")
    default = _runs(result, "adam", "default") if result else []
    tuned = _runs(result, "adam", "tuned") if result else []
    if not default or not tuned:
        return Verdict("not measured", "Adam was not run on FACES both at 1e-3 and tuned.")
    end = _moment([*default, *tuned], 0)
    if end is None:
        return Verdict("not measured", f"FACES: {_apart(0)}.")
    a, b, start = _best(default, end, 0), _best(tuned, end, 0), _start(default)
    held = not math.isfinite(a) or a > start or a >= 2 * b
    theirs = f"tuned {_adam(tuned)} is at {_number(b)}"
    if all(_diverged(run) for run in default):
        lost = min(u for run in default for u, _, v in run["points"] if not _is_finite(v))
        said = f"Adam 1e-3 diverged within {lost:,} updates; {theirs} {_after(end, 0)}"
    else:
        said = (
            f"Adam 1e-3 did not diverge: {_after(end, 0)} it is at {_number(a)}, from "
            f"{_number(start)}; {theirs}"
        )
    return Verdict("held" if held else "not held", f"{said.rstrip()}.")


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
        "Adam with the default rate of 1e-3 struggles on FACES (the paper: diverges).",
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
    results: Results, test: Callable[[dict[str, Any]], Found], prefix: str = ""
) -> Verdict:
    """One test on each data set: not held if it fails on any, held if it was found true on all.

    Results are those saved under a data set's name, behind a prefix.
    """
    names = {name: prefix + name for name in DATA_SETS}
    if not any(saved in results for saved in names.values()):
        return Verdict("not measured", "None of the three data sets was measured.")
    found = {
        name: test(results[saved]) if saved in results else (None, MISSING)
        for name, saved in names.items()
    }
    sentence = " ".join(f"{name.upper()}: {said}." for name, (_, said) in found.items())
    return Verdict(OUTCOMES[_all(true for true, _ in found.values())], sentence)


def _all(parts: Iterable[bool | None]) -> bool | None:
    """False if one is; else None, which is not known, if one is."""
    known = list(parts)
    if False in known:
        return False
    return None if None in known else True


def _against_adam(result: dict[str, Any], column: int) -> Found:
    adam = _runs(result, "adam", "tuned")
    ours = {method: _runs(result, method) for method in SECOND_ORDER}
    if not adam or not all(ours.values()):
        return None, MISSING
    end = _moment([*adam, *(run for runs in ours.values() for run in runs)], column)
    if end is None:
        return None, _apart(column)
    losses = {method: _best(runs, end, column) for method, runs in ours.items()}
    theirs = _best(adam, end, column)
    numbers = [f"{method.upper()} {_loss(ours[method], loss)}" for method, loss in losses.items()]
    sentence = ", ".join([*numbers, f"{_adam(adam)} {_loss(adam, theirs)}"])
    lower = all(loss < theirs for loss in losses.values())
    return lower, f"{_after(end, column)} {sentence}".lstrip()


def _runs(result: dict[str, Any], method: str, setting: str | None = None) -> list[Run]:
    return list(_matching(result, method, setting))


def _matching(result: dict[str, Any], method: str, setting: str | None) -> Iterator[Run]:
    for problem in result["problems"]:
        for run in problem["runs"]:
            fits = setting is None or run.get("setting") == setting
            if run.get("method") == method and fits:
                yield run


def _diverged(run: Run) -> bool:
    return not _is_finite(run["points"][-1][2])


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _moment(runs: Sequence[Run], column: int) -> float | None:
    """The last update or second, after some training, at which all runs can be compared.

    Those that diverged are left out; infinite if all did. None if there is no such moment.
    """
    standing = [[p[column] for p in run["points"]] for run in runs if not _diverged(run)]
    if not standing:
        return math.inf
    if column == 0:
        end = max(set.intersection(*map(set, standing)), default=0)
    else:
        end = min(seconds[-1] for seconds in standing)
    begun = max(each[0] for each in standing)
    return float(end) if end > 0 and end >= begun else None


def _best(runs: Sequence[Run], end: float, column: int) -> float:
    return min(_loss_at(run, end, column) for run in runs)


def _loss_at(run: Run, end: float, column: int) -> float:
    """The averaged loss of a run at a moment; infinite if it is no number, or if it diverged."""
    if _diverged(run):
        return math.inf
    value = _interpolated(smoothed(run["points"], window_of(run)), end, column)
    return value if math.isfinite(value) else math.inf


def _interpolated(points: Sequence[Sequence[Any]], end: float, column: int) -> float:
    """The loss at a moment: its logarithm is linear between the two points around it."""
    i = next(i for i, point in enumerate(points) if point[column] >= end)
    after, loss = points[i][column], float(points[i][2])
    if after == end:
        return loss
    before, earlier = points[i - 1][column], float(points[i - 1][2])
    share = (end - before) / (after - before)
    if earlier > 0 and loss > 0:
        return earlier * (loss / earlier) ** share
    return earlier + share * (loss - earlier)  # no logarithm


def _start(runs: Sequence[Run]) -> float:
    """The loss before training, where all runs of a method begin."""
    first = runs[0]["points"][0][2]
    return math.nan if first is None else float(first)


def _adam(tuned: Sequence[Run]) -> str:
    """Tuned Adam, with the number of settings it is the best of, where that is known."""
    count = next((run["tuned_of"] for run in tuned if run.get("tuned_of")), None)
    return f"Adam (best of {count} settings)" if count else "Adam"


def _loss(runs: Sequence[Run], value: float) -> str:
    """A method's loss in words, with what became of its runs."""
    lost = sum(map(_diverged, runs))
    if lost == len(runs):
        return "diverged"
    return _number(value) + (f" ({lost} of {len(runs)} variants diverged)" if lost else "")


def _after(end: float, column: int) -> str:
    return f"after {end:.4g} {UNITS[column]}" if math.isfinite(end) else ""


def _apart(column: int) -> str:
    return f"the runs have no number of {'updates' if column == 0 else 'seconds'} in common"


def _mean(values: list[float | None], kept: list[bool]) -> float:
    known = [v for v, keep in zip(values, kept, strict=True) if keep and v is not None]
    return fmean(known) if known else math.nan


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "no number"
