"""Every verdict on numbers made up for it, on both sides of its line."""

from __future__ import annotations

from typing import Any

import pytest

from gaussnewton.experiments import claims
from gaussnewton.experiments.claims import CLAIMS, Verdict
from gaussnewton.experiments.figures import surface


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


def test_kfra_beats_kfac() -> None:
    assert claims.kfra_beats_kfac(results(run("kfra", 4.0), run("kfac", 5.0))).outcome == "held"
    assert claims.kfra_beats_kfac(results(run("kfra", 5.0), run("kfac", 5.0))).outcome == "not held"
    slow = claims.kfra_beats_kfac(results(run("kfra", 4.0, pace=3.0), run("kfac", 5.0)))
    assert slow.outcome == "not held"
    assert "4 against 5 after 40 updates, 100 against 5 after 40 s" in slow.sentence
    assert claims.kfra_beats_kfac(results(run("kfra", 4.0))).outcome == "not measured"


def aligned(layer: float, whole: float, **changes: Any) -> dict[str, Any]:
    """KFRA at the given cosines, KFAC at a half, for both inversions."""
    steps = {"kfra": layer, "kfra*": layer, "kfac": 0.5, "kfac*": 0.5}
    return {
        "figure": "alignment", "title": "CURVES",
        "residuals": {"layers": [0.01, 0.1], "whole": [0.1, 0.0]},
        "layers": {"0": {step: [v, v] for step, v in steps.items()}},
        "whole": {step: [whole if "kfra" in step else 0.5] * 2 for step in steps}, **changes,
    }  # fmt: skip


def test_kfra_aligns_better() -> None:
    judge = claims.kfra_aligns_better
    assert judge({"a": aligned(0.6, 0.7)}).outcome == "held"
    assert judge({"a": aligned(0.4, 0.7)}).outcome == "not held"
    assert judge({"a": aligned(0.6, 0.4)}).outcome == "not held"
    assert judge({"a": aligned(0.6, 0.7), "b": aligned(0.6, 0.4)}).outcome == "not held"
    assert "layers 0.600 against 0.500, whole 0.700" in judge({"a": aligned(0.6, 0.7)}).sentence
    assert judge({}).outcome == "not measured"
    one_star = aligned(0.6, 0.7)
    one_star["whole"]["kfra*"] = [0.4, None]  # a cosine that is no number is left out
    assert judge({"a": one_star}).outcome == "not held"


def test_alignment_with_steps_that_are_not_exact_is_not_judged() -> None:
    judge = claims.kfra_aligns_better
    far = {"layers": [0.01, 0.01], "whole": [0.11, None]}
    lost = aligned(0.6, 0.4, residuals=far)
    verdict = judge({"a": lost})
    assert verdict.outcome == "not measured"
    assert "CURVES: no reference step converged." in verdict.sentence
    assert judge({"a": lost, "b": aligned(0.6, 0.7)}).outcome == "held"
    half = aligned(0.6, 0.7, residuals={"layers": [0.01, 0.01], "whole": [0.01, 0.2]})
    half["whole"]["kfra"] = [0.7, -1.0]  # of the point that is left out
    found = judge({"a": half})
    assert found.outcome == "held"
    assert "whole 0.700 against 0.500" in found.sentence
    assert "1 reference steps did not converge and are left out" in found.sentence


def mixture(factor: float) -> dict[str, Any]:
    """KFLR falls evenly from 100 to 1, and KFAC is at a multiple of it all along."""
    falling = [100.0 ** (1 - u / 99) for u in range(100)]
    runs = []
    for method, times in (("kflr", 1.0), ("kfac", factor)):
        points = [[u + 1, float(u + 1), times * v] for u, v in enumerate(falling)]
        runs.append({"title": method, "style": method, "method": method, "points": points})
    return results(*runs, names=("mixture",))


def test_kfac_is_like_kflr() -> None:
    """KFLR falls by about eighty, averaged, so a factor of 80^0.1 = 1.55 is allowed."""
    for factor in (1.0, 1.5, 1 / 1.5):
        assert claims.kfac_like_kflr(mixture(factor)).outcome == "held"
    for factor in (1.6, 1 / 1.6):
        assert claims.kfac_like_kflr(mixture(factor)).outcome == "not held"
    far = claims.kfac_like_kflr(mixture(5.0))
    assert "differ by a factor of 5 (median)" in far.sentence
    assert claims.kfac_like_kflr({}).outcome == "not measured"
    alone = results(run("kfac", 1.0), names=("mixture",))
    assert claims.kfac_like_kflr(alone).outcome == "not measured"


@pytest.mark.parametrize(
    ("final", "outcome"),
    [(None, "held"), (120.0, "held"), (61.0, "held"), (59.0, "not held"), (20.0, "not held")],
)
def test_adam_struggles_on_faces(final: float | None, outcome: str) -> None:
    """From 100, with tuned Adam at 30, so that a loss of 60 is twice as high."""
    tuned = run("adam", 30.0, setting="tuned")
    measured = results(run("adam", final, setting="default"), tuned, names=("faces",))
    assert claims.adam_struggles_on_faces(measured).outcome == outcome


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
