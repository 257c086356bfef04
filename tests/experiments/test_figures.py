"""What the figures compute, beside direct computation."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import gaussnewton as gn
from gaussnewton.experiments.data import batches
from gaussnewton.experiments.figures import FIGURES, alignment, rank, surface
from gaussnewton.experiments.figures.maxima import maxima_on_grid, maxima_on_lines

AXIS = torch.linspace(-1, 1, 9).double()


def one_region(points: int = 9) -> torch.Tensor:
    return torch.ones(points, points, 1, dtype=torch.bool)


# Maxima


def test_a_hill_is_found_where_it_is_smooth_and_a_ridge_is_no_strict_maximum() -> None:
    hill = -(AXIS[:, None] - 0.25).square() - (AXIS - 0.5).square()
    found = maxima_on_grid(hill, one_region())
    assert (found["maxima_smooth"], found["maxima_kinks"]) == (1, 0)
    assert found["places"] == [[5, 6]]
    assert found["points"] == found["smooth"] == 49
    ridge = -AXIS[:, None].square() + 0 * AXIS
    assert maxima_on_grid(ridge, one_region())["places"] == []
    saddle = AXIS[:, None] * AXIS
    assert maxima_on_grid(saddle, one_region())["places"] == []


def test_a_roof_has_its_maximum_at_the_kink() -> None:
    roof = -AXIS.abs()[:, None] - AXIS.abs()
    pattern = torch.stack([(AXIS > 0)[:, None].expand(9, 9), (AXIS > 0).expand(9, 9)], 2)
    found = maxima_on_grid(roof, pattern)
    assert (found["maxima_smooth"], found["maxima_kinks"]) == (0, 1)
    # Rows and columns 3, 4 and 5 around the middle touch both sides of a kink, except that
    # 3 has only points that are off around it.
    assert found["kinks"] == 49 - 25


def test_lines() -> None:
    before, middle, after = (torch.tensor(v).double() for v in ([0, 0, 1], [1, 0, 2], [0, 1, 9]))
    smooth = torch.tensor([False, True, True])
    found = maxima_on_lines(before, middle, after, smooth)
    assert (found["maxima_smooth"], found["maxima_kinks"]) == (0, 1)
    assert (found["concave_smooth"], found["concave_kinks"]) == (0, 1)
    bent = maxima_on_lines(before, middle + 3, after, torch.ones(3, dtype=torch.bool))
    assert bent["concave_smooth"] == 2  # the last lies on a straight line


# Surface


def test_the_surface_is_the_error_of_such_a_network() -> None:
    """Panel (b) is quadratic and (c) has its axes in common with the origin."""
    result = surface.compute(points=21, directions=200)
    a, b, c = (torch.tensor(p["E"]).double() for p in result["panels"])
    third = b.diff(n=3, dim=0).abs().max() / b.abs().max()
    assert third < 1e-5  # six digits are saved
    assert a.diff(n=3, dim=0).abs().max() / a.abs().max() > 1e-3  # bent at kinks
    middle = c[10, 10]
    assert torch.equal(c[10], middle.expand(21))  # W₁ = 0
    assert torch.equal(c[:, 10], middle.expand(21))  # W₂ = 0
    assert a[10, 10] == middle  # W₁ = 0 there too
    # For x > 0 the pattern is one, and E is a function of x y.
    assert c[14, 12] == pytest.approx(float(c[12, 14]), rel=1e-5)


def test_no_smooth_maximum_but_some_at_kinks() -> None:
    result = surface.compute(points=41, directions=20_000)
    total, lines = result["total"], result["directions"]
    assert total["points"] == 3 * 39**2
    assert total["smooth"] + total["kinks"] == total["points"]
    assert total["smooth"] > 1000
    assert total["maxima_smooth"] == 0
    assert lines["smooth"] > 10_000
    assert lines["maxima_smooth"] == lines["concave_smooth"] == 0
    assert lines["maxima_kinks"] > 0  # so that they are looked for at all
    assert lines["concave_kinks"] > lines["maxima_kinks"]


def test_a_smooth_activation_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tanh, and signs still taken for the pattern, E is concave at many smooth points."""
    monkeypatch.setattr(torch.Tensor, "relu", torch.Tensor.tanh)
    assert surface.compute(points=11, directions=2000)["directions"]["concave_smooth"] > 100


# Rank


def test_ranks_are_those_of_dense_matrices() -> None:
    title, model, criterion, (x, y) = rank.problems(data=6)[0]
    result = rank.compute([(title, model, criterion, (x, y))], counts=(2, 6), samples=(1, 2))
    (panel,) = result["panels"]
    assert panel["parameters"] == 178
    G = gn.exact.gauss_newton(model, criterion, (x, y))
    assert panel["series"][0]["rank"][1] == torch.linalg.matrix_rank(G, hermitian=True) == 54
    assert panel["series"][0]["bound"] == [18, 54]
    assert panel["series"][1]["rank"] == [2, 6]
    for series in panel["series"]:
        assert all(r <= b for r, b in zip(series["rank"], series["bound"], strict=True))
    assert result["violations"] == 0
    assert result["checked"] == 6


def test_score_gradients_are_gradients_of_sampled_losses() -> None:
    """For classes the score of a drawn y is that of −log p(y|x), up to sign and scale."""
    _, model, criterion, (x, y) = rank.problems(data=3)[0]
    rows = rank._score_gradients(model, criterion, x, y, 1, seed=0)
    theta = gn.Theta(model)
    for n in range(3):
        cosines = []
        for k in range(10):
            model.zero_grad()
            criterion(model(x[n : n + 1]), torch.tensor([k])).backward()
            g = theta.vector({key: p.grad for key, p in model.named_parameters()})
            cosines.append(float(torch.cosine_similarity(rows[n, 0], g, dim=0).abs()))
        assert max(cosines) == pytest.approx(1, abs=1e-9)


def test_more_samples_add_nothing_to_one_output() -> None:
    result = rank.compute(counts=(5, 10), samples=(1, 4))
    one = result["panels"][1]["series"]
    assert one[1]["rank"] == one[2]["rank"] == one[0]["rank"] == [5, 10]
    ten = result["panels"][0]["series"]
    assert ten[2]["rank"][0] > ten[1]["rank"][0]
    # Of two targets, as of the mixture, the scores have mean zero, and so are parallel too.
    said = "More samples add nothing for: one output, mixture of two classifiers."
    assert rank.caption(result).endswith(f"0 of 18 ranks exceed their bound. {said}")


def test_the_caption_says_of_samples_only_what_was_seen() -> None:
    ten, one, _ = rank.problems(data=6)
    assert "samples add" not in rank.caption(rank.compute([ten], counts=(6,), samples=(1, 2)))
    assert "samples add" not in rank.caption(rank.compute([one], counts=(6,), samples=(1,)))
    # With one datum for each parameter and more there is no room for any difference.
    full = rank.compute([one], counts=(6,), samples=(1, 2))
    full["panels"][0]["series"][2]["bound"] = full["panels"][0]["series"][1]["bound"]
    assert "samples add" not in rank.caption(full)


# Alignment


def autoencoder() -> nn.Sequential:
    torch.manual_seed(1)
    sizes = [6, 5, 3, 5, 6]
    parts = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*parts[:-1]).double()


def test_alignment_follows_the_trajectory_of_kfra_star() -> None:
    model, twin, data = autoencoder(), autoencoder(), torch.rand(60, 6).double()
    criterion = nn.BCEWithLogitsLoss()
    result = alignment.compute(
        model, criterion, batches(data, size=20), updates=(1, 3), methods=("kfra", "kfac"),
        weight_decay=1e-3, max_iterations=8,
    )  # fmt: skip
    # The same by hand. Batches 2 and 5 are those that are looked at.
    settings = {**gn.PAPER, "curvature": "kfra", "inversion": "factored"}
    optimizer = gn.GaussNewton(twin, criterion, weight_decay=1e-3, **settings)
    own = batches(data, size=20)
    for t in (1, 2, 3):
        x, y = next(own)
        optimizer.zero_grad()
        criterion(twin(x), y).backward()
        optimizer.step()
        if t in (1, 3):
            x, y = next(own)
            looked_at = copy.deepcopy(twin)
            gamma = optimizer.diagnostics["gamma"]
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
    expected = gn.alignment(
        looked_at, criterion, (x, y), ("kfra", "kfac"), damping=gamma + 1e-3,
        weight_decay=1e-3, max_iterations=8, tolerance=1e-3,
    )  # fmt: skip
    assert result["damping"][-1] == pytest.approx(gamma + 1e-3)
    assert {step: values[-1] for step, values in result["whole"].items()} == pytest.approx(
        expected.whole
    )
    assert result["layers"]["4"]["kfac*"][-1] == pytest.approx(expected.layers["4"]["kfac*"])
    assert result["block_diagonal"][-1] == pytest.approx(expected.block_diagonal)
    assert result["residuals"]["whole"][-1] == pytest.approx(expected.whole_solve.residual)
    assert result["loss"][-1] == pytest.approx(float(criterion(looked_at(x), y).detach()))
    assert json.loads(json.dumps(result)) == result


def test_the_seed_is_that_of_the_draws() -> None:
    def found(seed: int) -> dict[str, list[float]]:
        data = batches(
            torch.rand(60, 6, generator=torch.Generator().manual_seed(0)).double(), size=20
        )
        settings = {"updates": (1,), "max_iterations": 3, "seed": seed}
        return alignment.compute(autoencoder(), nn.BCEWithLogitsLoss(), data, **settings)["whole"]

    one, again, other = found(0), found(0), found(1)
    assert list(one) == ["kfra", "kfra*", "kfac", "kfac*", "kflr", "kflr*"]
    assert one == again
    assert {step for step in one if one[step] != other[step]} == {"kfac", "kfac*"}


def test_a_residual_that_is_no_number_can_be_said() -> None:
    data = batches(torch.rand(20, 6).double(), size=20)
    result = alignment.compute(autoencoder(), nn.BCEWithLogitsLoss(), data, updates=(1,))
    result["residuals"]["whole"] = [None]  # as it comes back from JSON
    assert "inf (full)" in alignment.caption(result)


def test_alignment_wants_rising_updates() -> None:
    for updates in ((), (0, 1), (2, 1)):
        with pytest.raises(ValueError, match="must rise"):
            alignment.compute(autoencoder(), nn.MSELoss(), iter(()), updates=updates)


# All of them


def test_every_figure_is_there() -> None:
    assert set(FIGURES) == {
        "surface", "rank", "alignment", "curves", "faces", "mnist", "mixture", "cpu"
    }  # fmt: skip
    assert all(name == kind.name for name, kind in FIGURES.items())


def test_importing_does_not_import_matplotlib() -> None:
    """Neither the package nor the registry, which a command lists."""
    code = "import gaussnewton.experiments.figures, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
