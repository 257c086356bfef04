"""The page: whole, well-formed, alone, and true to the results."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gaussnewton.cli import main
from gaussnewton.errors import DataError
from gaussnewton.experiments.claims import CLAIMS, Claim
from gaussnewton.experiments.figures import FIGURES
from gaussnewton.experiments.report import endings, inline, read_results, report

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks nesting; collects ids, what is referred to, cells and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        for key, value in attrs:
            if key == "id":
                self.ids.append(value or "")
            if key in ("href", "xlink:href", "src"):
                self.references.append(value or "")
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def run(title: str, method: str, final: float | None, setting: str = "") -> dict[str, Any]:
    points = [[u, u * 0.5, 9.0 if u < 20 else final] for u in range(1, 41)]
    return {"title": title, "style": method, "method": method, "setting": setting,
            "points": points}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    rank = FIGURES["rank"]
    rank.save(rank.compute(counts=(1, 2), samples=(1,)), folder)
    runs = [
        run("KFRA & <co>", "kfra", 1.25),
        run("KFAC", "kfac", 2.0),
        run("Adam", "adam", 4.0, "tuned"),
        run("Adam 1e-3", "adam", None, "default"),
    ]
    for name in ("curves", "faces", "mnist"):
        result = FIGURES[name].compute([{"title": name.upper(), "runs": runs}], budget="20 s")
        if name == "curves":
            FIGURES[name].save(result, folder)
        else:
            (folder / f"{name}.json").write_text(json.dumps(result))
    # The same drawing twice, whose ids must not meet. That of mnist is missing, and made anew.
    shutil.copy(folder / "curves.svg", folder / "faces.svg")
    table = {"title": "Speed", "headers": ["what", "ms"], "rows": [["KFRA", 250]]}
    (folder / "speed.table.json").write_text(json.dumps(table))
    (folder / "notes.json").write_text('{"of": "someone else"}')
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(report(folder).read_text(encoding="utf-8"))


def test_the_page_is_well_formed_and_needs_nothing_else(folder: Path, page: Page) -> None:
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)  # also across figures
    assert page.references
    for reference in page.references:
        assert reference.startswith(("#", "data:"))
        if reference.startswith("#"):
            assert reference[1:] in page.ids
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    text = (folder / "index.html").read_text(encoding="utf-8")
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert "@import" not in text


def test_figures_in_the_order_of_the_paper_with_captions(folder: Path, page: Page) -> None:
    assert list(read_results(folder)) == ["curves", "faces", "mnist", "rank"]
    assert [i for i in page.ids if i.startswith("figure-")] == [
        "figure-curves", "figure-faces", "figure-mnist", "figure-rank"
    ]  # fmt: skip
    assert page.tags.count("svg") == page.tags.count("figcaption") == 4
    assert "Budget: 20 s." in (folder / "index.html").read_text(encoding="utf-8")


def test_every_claim_has_its_verdict(page: Page) -> None:
    rows = {row[0]: row for row in page.rows}
    found = {
        claim.statement: next(row for key, row in rows.items() if claim.statement in key)
        for claim in CLAIMS
    }
    outcomes = [row[2].strip() for row in found.values()]
    assert outcomes == [
        "✓ held", "✓ held", "✓ held", "– not measured", "– not measured", "✓ held",
        "– not measured", "✓ held",
    ]  # fmt: skip
    assert "KFRA 1.25, KFAC 2, Adam 4" in found[CLAIMS[0].statement][1]


def test_final_numbers_and_tables(page: Page) -> None:
    assert ["CURVES", "KFRA & <co>", "40", "20.0", "500", "1.25"] in page.rows  # and escaped
    assert ["FACES", "Adam 1e-3", "40", "20.0", "500", "no number"] in page.rows
    assert ["KFRA", "250"] in page.rows


def test_a_claim_that_fails_is_said_to(tmp_path: Path) -> None:
    kind = FIGURES["rank"]
    result = kind.compute(counts=(1,), samples=(1,))
    result["violations"] = 1
    kind.save(result, tmp_path)
    path = report(tmp_path, tmp_path / "page.html", title="Of my own")
    text = path.read_text(encoding="utf-8")
    assert path.name == "page.html"
    assert "<h1>Of my own</h1>" in text
    assert "✗ not held" in text
    assert "0 held, 1 not held," in text
    assert "Final numbers" not in text


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no saved result"):
        report(tmp_path)


def rank_result(folder: Path) -> None:
    kind = FIGURES["rank"]
    kind.save(kind.compute(counts=(1,), samples=(1,)), folder)


@pytest.mark.parametrize(
    "foreign",
    ["[1, 2]", '"text"', "null", "{}", '{"figure": "mine"}', '{"figure": ["rank"]}',
     '{"figure": "curves"}', '{"figure": "rank", "panels": []}'],
)  # fmt: skip
@pytest.mark.parametrize("name", ["foreign.json", "foreign.table.json"])
def test_files_of_others_are_left_alone(name: str, foreign: str, tmp_path: Path) -> None:
    rank_result(tmp_path)
    page = report(tmp_path).read_bytes()
    (tmp_path / name).write_text(foreign)
    assert report(tmp_path).read_bytes() == page


@pytest.mark.parametrize("name", ["rank.json", "speed.table.json"])
def test_a_cut_result_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rank_result(tmp_path)
    (tmp_path / name).write_text('{"figure": "rank", "pan')
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{name} cannot be read" in said
    assert "Delete it" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "index.html").exists()


def test_a_cut_drawing_is_made_anew(tmp_path: Path) -> None:
    rank_result(tmp_path)
    page = report(tmp_path).read_bytes()
    svg = tmp_path / "rank.svg"
    for cut in (svg.read_bytes()[:-20], b"", b"\xff"):
        svg.write_bytes(cut)
        assert report(tmp_path).read_bytes() == page


def test_the_page_is_the_old_one_until_it_is_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_result(tmp_path)
    page = report(tmp_path, title="old")
    before = page.read_bytes()

    def crash(_: Path, __: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        report(tmp_path, title="new")
    assert page.read_bytes() == before


def test_claims_are_judged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    rank_result(tmp_path)
    judge, judged = Claim.judge, []

    def counted(claim: Claim, results: Any) -> Any:
        judged.append(claim.statement)
        return judge(claim, results)

    monkeypatch.setattr(Claim, "judge", counted)
    assert main(["report", str(tmp_path)]) == 0
    assert judged == [claim.statement for claim in CLAIMS]
    assert "1 held, 0 not held" in capsys.readouterr().out


def test_inlined_figures_do_not_share_ids_and_take_the_pages_ink() -> None:
    svg = (
        '<?xml version="1.0"?><!DOCTYPE svg><svg width="1pt" height="1pt" viewBox="0 0 1 1">'
        "<metadata>who\nand when</metadata><clipPath id='x'/>"
        '<g id="a" style="stroke: #1f2328" clip-path="url(#a)"/><use xlink:href="#a"/></svg>'
    )
    found = inline(svg, "rank", 'The "rank"')
    assert found.startswith('<svg role="img" aria-label="The &quot;rank&quot;" viewBox="0 0 1 1">')
    assert "currentColor" in found
    assert "#1f2328" not in found
    assert "metadata" not in found
    assert 'id="rank-a"' in found
    assert 'url(#rank-a)"/><use xlink:href="#rank-a"' in found


def test_a_run_that_two_figures_show_has_one_row() -> None:
    def shown(title: str) -> dict[str, Any]:
        run = {"title": title, "points": [[0, 0.0, 3.0], [10, 2.0, 1.0]], "window": 1}
        return {"problems": [{"title": "CURVES", "runs": [run]}]}

    both = {"curves": shown("Adam, tuned: rate 2^-9"), "cpu": shown("Adam, tuned")}
    assert [row.run for row in endings(both)] == ["Adam, tuned: rate 2^-9"]
