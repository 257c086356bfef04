"""What the drawings show, read back from them."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from gaussnewton.errors import DataError
from gaussnewton.experiments.figures import FIGURES, alignment, load, progress, rank, save, surface
from gaussnewton.experiments.figures.saving import as_svg
from gaussnewton.experiments.figures.style import COLOURS, line


def run(title: str, style: str, losses: list[float | None], seconds: float = 0.5) -> dict[str, Any]:
    points = [[i, i * seconds, v] for i, v in enumerate(losses, start=1)]
    return {"title": title, "style": style, "points": points}


def progress_result(**settings: Any) -> dict[str, Any]:
    runs = [run("KFRA", "kfra", [8.0, 4.0, 2.0]), run("Adam", "adam dashed", [9.0, 8.0, 7.0], 0.25)]
    problems = [{"title": "CURVES", "runs": runs}]
    return FIGURES["curves"].compute(problems, budget="60 s a method", **settings)


def alignment_result() -> dict[str, Any]:
    steps = ("kfra", "kfra*", "kfac", "kfac*")
    cosines = {step: [0.9 - 0.1 * i, 0.8, math.nan] for i, step in enumerate(steps)}
    return {
        "figure": "alignment", "title": "CURVES", "updates": [1, 10, 100], "loss": [3, 2, 1],
        "damping": [1, 1, 1], "layers": {str(i): cosines for i in range(3)}, "whole": cosines,
        "block_diagonal": [0.95, 0.9, 0.9], "residuals": {"layers": [0.1] * 3, "whole": [0.2] * 3},
        "converged": [False] * 3, "settings": {"max_iterations": 7, "tolerance": 1e-3},
    }  # fmt: skip


def texts(figure: Any) -> str:
    from matplotlib.text import Text

    return "\n".join(t.get_text() for t in figure.findobj(Text))


def test_progress_draws_the_smoothed_points_by_update_and_by_second() -> None:
    figure = progress.draw(progress_result())
    left, right = figure.axes
    drawn = [list(zip(*artist.get_data(), strict=True)) for artist in left.lines]
    assert drawn[0] == [(1, 8), (2, 6), (3, pytest.approx(14 / 3))]  # the mean so far
    assert list(right.lines[1].get_xdata()) == [0.25, 0.5, 0.75]
    assert left.lines[0].get_color() == COLOURS["kfra"]
    assert left.lines[1].get_linestyle() == "--"
    assert left.lines[0].get_linestyle() == "-"
    assert {"KFRA", "Adam", "budget: 60 s a method", "CURVES, by update"} <= set(
        texts(figure).split("\n")
    )


@pytest.mark.parametrize(
    ("losses", "scale"), [([8.0, 1.0], "linear"), ([9.0] + [0.1] * 30, "log"), ([1, -1], "linear")]
)
def test_the_scale_is_logarithmic_where_it_helps(losses: list[float], scale: str) -> None:
    problem = {"title": "P", "runs": [run("KFRA", "kfra", losses)]}
    figure = progress.draw(progress.compute("curves", [problem], budget=""))
    assert figure.axes[0].get_yscale() == scale


def test_the_window_is_of_ten() -> None:
    points = [[i, i, float(i)] for i in range(1, 21)]
    assert progress.smoothed(points)[-1] == [20, 20, sum(range(11, 21)) / 10]
    assert progress.smoothed(points)[0] == [1, 1, 1]


def test_a_lost_run_ends_in_a_cross() -> None:
    problem = {"title": "FACES", "runs": [run("Adam", "adam", [3.0, 5.0, None, None])]}
    result = progress.compute("faces", [problem], budget="few")
    _, cross = progress.draw(result).axes[0].lines
    assert cross.get_marker() == "X"
    assert cross.get_data() == ([2], [4.0])
    assert "cross" in progress.caption(result)
    assert "cross" not in progress.caption(progress_result())


def test_single_panels_stand_side_by_side() -> None:
    problems = [{"title": t, "runs": [run("KFRA", "kfra", [2.0, 1.0])]} for t in ("A", "B", "C")]
    figure = progress.draw(FIGURES["cpu"].compute(problems, budget="b"))
    tops = {round(axes.get_position().y1, 3) for axes in figure.axes}
    assert len(figure.axes) == 3
    assert len(tops) == 1


def test_mean_of_top_settings() -> None:
    good, fair, bad = ([9.0, v, v] for v in (1.0, 2.0, 6.0))
    runs = [run("c", "adam", bad), run("lost", "adam", [9.0, None, None]), run("a", "adam", good),
            run("b", "adam", fair, seconds=1.5)]  # fmt: skip
    best = progress.mean_of_top(runs, 2, "top 2", "adam dotted")
    assert best["points"] == [[1, 1.0, 9.0], [2, 2.0, 1.5], [3, 3.0, 1.5]]
    assert progress.mean_of_top(runs, 3, "", "adam")["points"][2][2] == 3.0  # the lost one is last
    short = run("short", "adam", [1.0, 0.0])
    assert [p[0] for p in progress.mean_of_top([*runs, short], 2, "", "adam")["points"]] == [1, 2]
    with pytest.raises(ValueError, match="cannot be had"):
        progress.mean_of_top(runs, 5, "", "adam")


def test_what_progress_does_not_take() -> None:
    for runs, message in (
        ([], "at least one"),
        ([{"title": "x", "style": "kfra", "points": []}], "none, or not in order"),
        ([{"title": "x", "style": "kfra", "points": [[2, 1, 1], [1, 2, 1]]}], "not in order"),
        ([run("x", "plaid", [1.0])], "no style"),
    ):
        with pytest.raises(ValueError, match=message):
            progress.compute("curves", [{"title": "P", "runs": runs}], budget="")


def test_colours_differ_and_lines_too() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)
    kinds = {str(line(f"kfra {kind}")["linestyle"]) for kind in ("solid", "dashed", "dotted")}
    assert len(kinds) == 3


def test_alignment_has_a_panel_for_each_layer_and_one_for_the_whole() -> None:
    result = alignment_result()
    figure = alignment.draw(result)
    *layers, whole = figure.axes
    assert len(layers) == 3
    assert [len(axes.lines) for axes in (*layers, whole)] == [4, 4, 4, 5]
    assert list(whole.lines[0].get_ydata())[:2] == [0.9, 0.8]
    assert whole.lines[1].get_linestyle() == "--"  # the star
    assert whole.get_xscale() == "log"
    assert "KFRA*" in texts(figure)
    for shown in (texts(figure), alignment.caption(result)):
        assert "at most 7 iterations" in shown
        assert "0.1 (layers) and 0.2 (full)" in shown


def test_rank_draws_marks_and_bounds() -> None:
    result = rank.compute(counts=(1, 3), samples=(1,))
    axes = rank.draw(result).axes[0]
    marks = [artist for artist in axes.lines if artist.get_linestyle() == "None"]
    assert [list(artist.get_ydata()) for artist in marks] == [[9, 27], [1, 3]]


def test_surface_marks_maxima_at_kinks() -> None:
    result = surface.compute(points=11, directions=10)
    result["panels"][0]["check"]["places"] = [[3, 4]]
    result["total"]["maxima_kinks"] = 1
    figure = surface.draw(result)
    (mark,) = figure.axes[0].lines
    x, y, E = (float(v[0]) for v in mark.get_data_3d())
    panel = result["panels"][0]
    assert (x, y, E) == pytest.approx((panel["x"][3], panel["y"][4], panel["E"][3][4]), rel=1e-5)
    assert "1 at kinks (orange)" in texts(figure)
    assert len(figure.axes) == 3


def test_saving_and_loading(tmp_path: Path) -> None:
    result = alignment_result()
    result["layers"] = {"0": result["layers"]["0"]}
    paths = FIGURES["alignment"].save(result, tmp_path / "new", "alignment-curves")
    assert {p.name for p in (tmp_path / "new").iterdir()} == {
        "alignment-curves.json", "alignment-curves.svg", "alignment-curves.png"
    }  # fmt: skip
    assert paths["png"].read_bytes()[:4] == b"\x89PNG"
    again = load(paths["json"])
    assert again["whole"]["kfra"] == [0.9, 0.8, None]  # JSON has no NaN
    assert "NaN" not in paths["json"].read_text()
    assert alignment.caption(again) == alignment.caption(result)
    first = paths["svg"].read_text()
    assert ET.fromstring(first).tag.endswith("svg")
    assert as_svg(alignment.draw(again), "alignment-curves") == first
    (tmp_path / "list.json").write_text(json.dumps([1]))
    with pytest.raises(DataError, match="holds no result"):
        load(tmp_path / "list.json")
    paths["json"].write_bytes(paths["json"].read_bytes()[:-9])
    with pytest.raises(DataError, match=r"alignment-curves\.json cannot be read: .* Delete it"):
        load(paths["json"])


def test_figures_are_written_whole_and_their_numbers_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FIGURES["curves"].save(progress_result(), tmp_path, "x")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    replaced: list[str] = []

    def crash(_: Path, path: Path) -> None:
        replaced.append(path.suffix)
        if path.suffix == ".json":
            raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        FIGURES["curves"].save(progress_result(), tmp_path, "x")
    assert replaced == [".svg", ".png", ".json"]
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir() if not p.name.startswith(".")}
    assert after == before


def test_drawing_leaves_no_global_state(tmp_path: Path) -> None:
    import matplotlib
    from matplotlib._pylab_helpers import Gcf

    before = dict(matplotlib.rcParams)
    progress_figure = progress.draw(progress_result())
    save({}, progress_figure, tmp_path, "x")
    assert dict(matplotlib.rcParams) == before
    assert not Gcf.figs  # pyplot knows of none
