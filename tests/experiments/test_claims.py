"""Every verdict on numbers made up for it, on both sides of its line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from gaussnewton.experiments import claims
from gaussnewton.experiments.claims import CLAIMS, Verdict
from gaussnewton.experiments.figures import surface
from gaussnewton.experiments.training import due


def run(method: str, final: float | None, *, updates: int = 40, pace: float = 1.0,
        setting: str | None = None) -> dict[str, Any]:  # fmt: skip
    """From 100 down to ``final``, reached at half of the updates."""
    half = updates // 2
    points = [[u, u * pace, 100.0 if u < half else final] for u in range(1, updates + 1)]
    return {"title": method, "style": method, "method": method, "setting": setting,
            "points": points}  # fmt: skip


def results(*runs: dict[str, Any], names: tuple[str, ...] = claims.DATA_SETS) -> dict[str, Any]:
    result = {"problems": [{"title": "", "runs": list(runs)}]}
    return {name: {"figure": name, **result} for name in names}


ADAM = run("adam", 50.0, setting="tuned")


@pytest.mark.parametrize(
    ("kfra", "kfac", "outcome"),
    [(40.0, 45.0, "held"), (40.0, 55.0, "not held"), (50.0, 45.0, "not held"),
     (40.0, None, "not held")],
)  # fmt: skip
def test_beats_adam_by_update(kfra: float, kfac: float | None, outcome: str) -> None:
    verdict = claims.beats_adam_by_update(results(run("kfra", kfra), run("kfac", kfac), ADAM))
    assert verdict.outcome == outcome
    assert f"after 40 updates KFRA {kfra:g}, KFAC" in verdict.sentence
    assert "Adam 50" in verdict.sentence


def test_it_must_hold_on_all_data_sets() -> None:
    good = results(run("kfra", 40.0), run("kfac", 45.0), ADAM)
    two = {name: good[name] for name in ("curves", "mnist")}
    partly = claims.beats_adam_by_update(two)
    assert partly.outcome == "not measured"
    assert "CURVES: after 40" in partly.sentence
    assert "FACES: not measured" in partly.sentence
    bad = results(run("kfra", 60.0), run("kfac", 45.0), ADAM, names=("mnist",))
    assert claims.beats_adam_by_update(good | bad).outcome == "not held"
    assert claims.beats_adam_by_update({"curves": good["curves"]} | bad).outcome == "not held"


def test_seconds_are_not_updates() -> None:
    """Four times slower: ahead by update, behind at the second where Adam ends."""
    slow = [run("kfra", 40.0, pace=4.0), run("kfac", 45.0, pace=4.0)]
    measured = results(*slow, ADAM)
    assert claims.beats_adam_by_update(measured).outcome == "held"
    by_second = claims.beats_adam_by_second(measured)
    assert by_second.outcome == "not held"
    assert "after 40 s KFRA 100, KFAC 100, Adam 50" in by_second.sentence


def test_only_tuned_adam_counts() -> None:
    default = run("adam", 1.0, setting="default")
    assert claims.beats_adam_by_update(
        results(run("kfra", 40.0), run("kfac", 45.0), default)
    ).outcome == "not measured"  # fmt: skip
    assert claims.beats_adam_by_update(
        results(run("kfra", 40.0), run("kfac", 45.0), default, ADAM)
    ).outcome == "held"  # fmt: skip


def test_the_best_run_of_a_method_counts_at_the_last_update_all_have() -> None:
    runs = [run("kfra", 60.0), run("kfra", 40.0), run("kfac", 45.0), ADAM]
    assert claims.beats_adam_by_update(results(*runs)).outcome == "held"
    longer = run("adam", 1.0, updates=400, setting="tuned")  # lower only after 200
    verdict = claims.beats_adam_by_update(results(run("kfra", 40.0), run("kfac", 45.0), longer))
    assert verdict.outcome == "held"
    assert "after 40 updates" in verdict.sentence


def evaluated(method: str, last: int, loss: Callable[[float], float], pace: float = 1.0,
              setting: str | None = None) -> dict[str, Any]:  # fmt: skip
    """A run as it is recorded: evaluated at marks that grow apart, and at its own end."""
    marks = [u for u in range(last + 1) if due(u) or u == last]
    points = [[u, u * pace, loss(u)] for u in marks]
    return {**run(method, None, setting=setting), "points": points, "window": 1}


def falling(update: float) -> float:
    return 100.0 / (1.0 + update / 10)


def better(update: float) -> float:
    return 0.99 * falling(update)


def test_runs_are_compared_after_the_same_number_of_updates() -> None:
    """KFRA and KFAC end between two marks, where Adam has no point."""
    adam = evaluated("adam", 40_000, falling, setting="tuned")
    same = evaluated("kfra", 199, falling), evaluated("kfac", 193, falling)
    equal = claims.beats_adam_by_update(results(*same, adam))
    assert equal.outcome == "not held"
    assert "after 180 updates KFRA 5.263, KFAC 5.263, Adam 5.263" in equal.sentence


def test_better_at_every_update_is_better_wherever_the_runs_end() -> None:
    """Also where the other one just comes to a mark or an end that the better one has not."""
    for last in (12, 24, 49, 119, 199, 249):
        adam = evaluated("adam", last - 1, falling, setting="tuned")
        ours = evaluated("kfra", last, better), evaluated("kfac", last + 1, better)
        assert claims.beats_adam_by_update(results(*ours, adam)).outcome == "held"
        longer = evaluated("adam", last + 2, falling, setting="tuned")
        assert claims.beats_adam_by_update(results(*ours, longer)).outcome == "held"


def test_the_same_curve_by_second_is_as_good_however_it_is_sampled() -> None:
    """Fast updates are evaluated at other seconds than slow ones, and end at others too."""

    def sampled(method: str, last: int, pace: float, setting: str | None = None) -> dict[str, Any]:
        return evaluated(method, last, lambda u: falling(u * pace), pace, setting)

    runs = [sampled("kfra", 24, 8.0), sampled("kfac", 19, 10.3), sampled("adam", 198, 1.0, "tuned")]
    sentence = claims.beats_adam_by_second(results(*runs)).sentence
    found = re.search(r"after 192 s KFRA (\S+), KFAC (\S+), Adam (\S+)\. FACES", sentence)
    assert found
    for loss in found.groups():
        assert float(loss) == pytest.approx(falling(192.0), rel=2e-3)


def test_a_loss_of_zero_has_no_logarithm() -> None:
    ours = [evaluated(name, 9, lambda u: float(9 - u), pace=2.0) for name in claims.SECOND_ORDER]
    adam = evaluated("adam", 17, falling, setting="tuned")
    verdict = claims.beats_adam_by_second(results(*ours, adam))
    assert "after 17 s KFRA 0.5, KFAC 0.5, Adam 37.04" in verdict.sentence


def test_runs_without_a_moment_in_common_are_not_compared() -> None:
    """The start alone, before any update, is none."""
    adam = evaluated("adam", 50, falling, setting="tuned")
    apart = evaluated("kfra", 9, better)
    apart["points"] = [apart["points"][0], [51, 0.5, 1.0]]
    kfac = evaluated("kfac", 50, better)
    verdict = claims.beats_adam_by_update(results(apart, kfac, adam))
    assert verdict.outcome == "not measured"
    assert "CURVES: the runs have no number of updates in common." in verdict.sentence
    late = evaluated("kfra", 9, better, pace=100.0)
    late["points"] = late["points"][1:]
    assert claims.beats_adam_by_second(results(late, kfac, adam)).outcome == "not measured"
    # By second KFRA is far behind, whatever is unknown by update.
    apart["points"] = [[0, 0.0, 100.0], [51, 60.0, 99.0]]
    assert claims.kfra_beats_kfac(results(apart, kfac)).outcome == "not held"


def lost(method: str, at: int, **changes: Any) -> dict[str, Any]:
    """A run whose loss is no number after so many updates."""
    found = evaluated(method, at, falling)
    found["points"][-1][2] = None
    return {**found, **changes}


@pytest.mark.parametrize("judge", [claims.beats_adam_by_update, claims.beats_adam_by_second])
def test_a_variant_that_diverged_does_not_set_the_moment(
    judge: Callable[[claims.Results], Verdict],
) -> None:
    """After three updates Adam would be ahead, and so would the variant."""
    adam = evaluated("adam", 100, lambda u: 60.0 - u / 10, setting="tuned")
    ours = evaluated("kfra", 100, falling), evaluated("kfac", 100, falling)
    verdict = judge(results(*ours, lost("kfra", 3), adam))
    assert verdict.outcome == "held"
    assert "after 100 " in verdict.sentence
    assert "KFRA 9.091 (1 of 2 variants diverged), KFAC 9.091, Adam 50." in verdict.sentence


def test_a_method_that_diverged_loses() -> None:
    adam = evaluated("adam", 100, falling, setting="tuned")
    kfac = evaluated("kfac", 100, better)
    verdict = claims.beats_adam_by_update(results(lost("kfra", 3), kfac, adam))
    assert verdict.outcome == "not held"
    assert "after 100 updates KFRA diverged, KFAC 9, Adam 9.091." in verdict.sentence
    none = results(lost("kfra", 3), lost("kfac", 3), lost("adam", 3, setting="tuned"))
    verdict = claims.beats_adam_by_update(none)
    assert verdict.outcome == "not held"
    assert "CURVES: KFRA diverged, KFAC diverged, Adam diverged." in verdict.sentence
    assert claims.kfra_beats_kfac(none).outcome == "not held"
    alone = claims.kfra_beats_kfac(results(evaluated("kfra", 100, falling), lost("kfac", 3)))
    assert alone.outcome == "held"
    assert "9.091 against diverged after 100 updates, " in alone.sentence


def test_the_sentence_says_among_how_many_settings_adam_was_tuned() -> None:
    ours = run("kfra", 40.0), run("kfac", 45.0)
    default = run("adam", 50.0, setting="default")
    tuned = {**ADAM, "tuned_of": 4}
    for judge in (claims.beats_adam_by_update, claims.beats_adam_by_second):
        assert "Adam (best of 4 settings) 50" in judge(results(*ours, tuned)).sentence
    said = claims.adam_struggles_on_faces(results(default, tuned, names=("faces",))).sentence
    assert "tuned Adam (best of 4 settings) is at 50" in said


def test_kfra_beats_kfac() -> None:
    """Five per cent below KFAC's 5 are 4.75."""
    assert claims.kfra_beats_kfac(results(run("kfra", 3.0), run("kfac", 5.0))).outcome == "held"
    little = claims.kfra_beats_kfac(results(run("kfra", 4.8), run("kfac", 5.0)))
    assert little.outcome == "not held"
    assert "4.8 against 5 after 40 updates (noticeably lower: 4.75 or less)" in little.sentence
    assert claims.kfra_beats_kfac(results(run("kfra", 5.0), run("kfac", 5.0))).outcome == "not held"
    slow = claims.kfra_beats_kfac(results(run("kfra", 3.0, pace=3.0), run("kfac", 5.0)))
    assert slow.outcome == "not held"
    assert "3 against 5 after 40 updates (" in slow.sentence
    assert "100 against 5 after 40 s (" in slow.sentence
    assert claims.kfra_beats_kfac(results(run("kfra", 4.0))).outcome == "not measured"


def aligned(layer: float, whole: float, **changes: Any) -> dict[str, Any]:
    """KFRA at the given cosines, KFAC at a half, for both inversions."""
    steps = {"kfra": layer, "kfra*": layer, "kfac": 0.5, "kfac*": 0.5}
    return {
        "figure": "alignment", "title": "",
        "residuals": {"layers": [0.01, 0.1], "whole": [0.1, 0.0]},
        "layers": {"0": {step: [v, v] for step, v in steps.items()}},
        "whole": {step: [whole if "kfra" in step else 0.5] * 2 for step in steps}, **changes,
    }  # fmt: skip


def trajectories(**changed: dict[str, Any]) -> dict[str, Any]:
    """All three where KFRA is better, but for those that are given."""
    found = {name: aligned(0.6, 0.7) for name in claims.DATA_SETS} | changed
    return {f"alignment-{name}": result for name, result in found.items()}


def test_kfra_aligns_better() -> None:
    judge = claims.kfra_aligns_better
    held = judge(trajectories())
    assert held.outcome == "held"
    assert "MNIST: exact inversion: layers 0.600 against 0.500, whole 0.700" in held.sentence
    assert judge(trajectories(curves=aligned(0.4, 0.7))).outcome == "not held"
    assert judge(trajectories(mnist=aligned(0.6, 0.4))).outcome == "not held"
    assert judge({}).outcome == "not measured"
    one_star = aligned(0.6, 0.7)
    one_star["whole"]["kfra*"] = [0.4, None]  # a cosine that is no number is left out
    assert judge(trajectories(faces=one_star)).outcome == "not held"


def test_alignment_is_judged_on_the_three_data_sets_and_no_other() -> None:
    judge = claims.kfra_aligns_better
    two = trajectories()
    del two["alignment-faces"]
    partly = judge(two)
    assert partly.outcome == "not measured"
    assert "FACES: not measured." in partly.sentence
    failed = two | {"alignment-mnist": aligned(0.6, 0.4)}
    assert judge(failed).outcome == "not held"
    other = {"alignment-tiny": aligned(0.6, 0.4), "curves": aligned(0.6, 0.4)}
    assert judge(other).outcome == "not measured"
    assert judge(trajectories() | other).outcome == "held"


def test_alignment_with_steps_that_are_not_exact_is_not_judged() -> None:
    judge = claims.kfra_aligns_better
    far = {"layers": [0.01, 0.01], "whole": [0.11, None]}
    verdict = judge(trajectories(curves=aligned(0.6, 0.4, residuals=far)))
    assert verdict.outcome == "not measured"
    assert "CURVES: no reference step converged." in verdict.sentence
    half = aligned(0.6, 0.7, residuals={"layers": [0.01, 0.01], "whole": [0.01, 0.2]})
    half["whole"]["kfra"] = [0.7, -1.0]  # of the point that is left out
    found = judge(trajectories(curves=half))
    assert found.outcome == "held"
    assert "whole 0.700 against 0.500" in found.sentence
    assert "1 reference steps did not converge and are left out" in found.sentence


def mixture(factor: float, last: float = 1.0) -> dict[str, Any]:
    """KFLR falls evenly from 100, and KFAC is at a multiple of it all along."""
    falling = [100.0 * (last / 100.0) ** (u / 99) for u in range(100)]
    runs = []
    for method, times in (("kflr", 1.0), ("kfac", factor)):
        points = [[u + 1, float(u + 1), times * v] for u, v in enumerate(falling)]
        runs.append({"title": method, "style": method, "method": method, "points": points})
    return results(*runs, names=("mixture",))


def test_kfac_is_like_kflr() -> None:
    """A factor of 1.25, or of 1.16 where KFLR falls by about 4.4, averaged, and 4.4^0.1 is 1.16."""
    for factor in (1.0, 1.24, 1 / 1.24):
        assert claims.kfac_like_kflr(mixture(factor)).outcome == "held"
    for factor in (1.26, 1 / 1.26):
        assert claims.kfac_like_kflr(mixture(factor)).outcome == "not held"
    for factor, outcome in ((1.15, "held"), (1.18, "not held")):
        assert claims.kfac_like_kflr(mixture(factor, last=21.0)).outcome == outcome
    far = claims.kfac_like_kflr(mixture(5.0))
    assert "differ by a factor of 5 (median)" in far.sentence
    assert claims.kfac_like_kflr({}).outcome == "not measured"
    alone = results(run("kfac", 1.0), names=("mixture",))
    assert claims.kfac_like_kflr(alone).outcome == "not measured"


def test_a_method_that_diverged_is_not_like_another() -> None:
    """Up to there the two may well have been alike."""
    alike = evaluated("kfac", 50, falling), lost("kflr", 40)
    verdict = claims.kfac_like_kflr(results(*alike, names=("mixture",)))
    assert verdict == Verdict("not held", "KFLR diverged on the mixture.")
    variants = *alike, evaluated("kflr", 50, falling)
    verdict = claims.kfac_like_kflr(results(*variants, names=("mixture",)))
    assert verdict.outcome == "held"
    assert "KFLR at 16.67 (1 of 2 variants diverged)." in verdict.sentence


@pytest.mark.parametrize(
    ("final", "outcome"),
    [(None, "held"), (120.0, "held"), (61.0, "held"), (59.0, "not held"), (20.0, "not held")],
)
def test_adam_struggles_on_faces(final: float | None, outcome: str) -> None:
    """From 100, with tuned Adam at 30, so that a loss of 60 is twice as high."""
    tuned = run("adam", 30.0, setting="tuned")
    measured = results(run("adam", final, setting="default"), tuned, names=("faces",))
    verdict = claims.adam_struggles_on_faces(measured)
    assert verdict.outcome == outcome
    said = "diverged within 20 updates; tuned Adam" if final is None else "did not diverge: after"
    assert f"Adam 1e-3 {said}" in verdict.sentence


def test_where_adam_diverged_tuned_adam_is_shown_at_its_end() -> None:
    tuned = evaluated("adam", 500, falling, setting="tuned")
    measured = results(lost("adam", 7, setting="default"), tuned, names=("faces",))
    assert claims.adam_struggles_on_faces(measured) == Verdict(
        "held",
        "Adam 1e-3 diverged within 7 updates; tuned Adam is at 1.961 after 500 updates.",
    )
    early = evaluated("adam", 0, falling, setting="default")
    unknown = claims.adam_struggles_on_faces(results(early, tuned, names=("faces",)))
    assert unknown.outcome == "not measured"


def test_ending_above_the_start_is_struggling_whatever_tuned_adam_does() -> None:
    runs = run("adam", 101.0, setting="default"), run("adam", 99.0, setting="tuned")
    assert claims.adam_struggles_on_faces(results(*runs, names=("faces",))).outcome == "held"


def test_adam_on_faces_may_also_start_without_a_number_or_be_missing() -> None:
    default = run("adam", None, setting="default")
    default["points"][0][2] = None
    measured = results(default, ADAM, names=("faces",))
    assert claims.adam_struggles_on_faces(measured).outcome == "held"
    assert claims.adam_struggles_on_faces(results(ADAM)).outcome == "not measured"


def test_smooth_maxima() -> None:
    result = surface.compute(points=21, directions=400)
    assert claims.no_smooth_maxima({"surface": result}).outcome == "held"
    for part, key in (("total", "maxima_smooth"), ("directions", "concave_smooth")):
        changed = {**result, part: {**result[part], key: 1}}
        assert claims.no_smooth_maxima({"surface": changed}).outcome == "not held"
    few = {**result, "total": {**result["total"], "smooth": 3}}
    assert claims.no_smooth_maxima({"surface": few}).outcome == "not measured"


def test_rank() -> None:
    for violations, outcome in ((0, "held"), (1, "not held")):
        result = {"rank": {"violations": violations, "checked": 9}}
        assert claims.rank_is_bounded(result) == Verdict(
            outcome, f"{violations} of 9 ranks exceed their bound."
        )


def test_nothing_measured_and_every_test_says_what_it_compares() -> None:
    for claim in CLAIMS:
        assert claim.judge({}).outcome == "not measured"
        assert claim.judge({}).sentence.endswith(".")
        assert claim.test.__doc__
    assert len({claim.statement for claim in CLAIMS}) == len(CLAIMS) == 8


def test_losses_of_much_data_are_not_averaged() -> None:
    """A run whose window is one counts with its last loss alone."""
    falling = run("kfra", 40.0)
    falling["points"][-1][2] = 1.0
    others = run("kfac", 45.0), ADAM
    wide = claims.beats_adam_by_update(results(falling, *others))
    narrow = claims.beats_adam_by_update(results({**falling, "window": 1}, *others))
    assert "KFRA 36.1" in wide.sentence
    assert "KFRA 1," in narrow.sentence
