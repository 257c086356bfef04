"""A folder of results as one HTML page that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaussnewton.errors import DataError
from gaussnewton.experiments.claims import CLAIMS, Claim, Verdict
from gaussnewton.experiments.extra import require
from gaussnewton.experiments.figures import FIGURES
from gaussnewton.experiments.figures.progress import final_loss
from gaussnewton.experiments.figures.saving import as_svg, load_json
from gaussnewton.experiments.figures.style import INK
from gaussnewton.experiments.writing import write_whole

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_TABLE = ".table.json"

Judged = tuple[Claim, Verdict]


@dataclass(frozen=True)
class Shown:
    """One figure on the page."""

    name: str
    title: str
    where: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Ending:
    """Where one run ended: a row of the table of final numbers."""

    problem: str
    run: str
    updates: int
    seconds: float
    loss: float
    milliseconds: float


def report(
    folder: str | Path,
    output: str | Path | None = None,
    *,
    title: str = "",
    claims: Sequence[Claim] = CLAIMS,
) -> Path:
    """Make a page of all results in a folder.

    Reads every ``*.json`` that a figure was saved as, and the SVG beside it; where that is
    missing or cut, the figure is drawn again. Other JSON files are left alone, except those named
    ``*.table.json``: ``{"title", "headers", "rows"}``, shown as tables.

    Args:
        folder: where :meth:`FigureKind.save <gaussnewton.experiments.figures.FigureKind.save>`
            wrote results.
        output: the page; by default ``index.html`` in the folder.
        title: a heading.
        claims: to be judged by the results; none are shown where there are none.

    Returns:
        The path of the page.

    Raises:
        DataError: if the folder holds no result, or a JSON file that is damaged.

    Example:
        >>> import tempfile
        >>> from gaussnewton.experiments.figures import FIGURES
        >>> from gaussnewton.experiments.report import report
        >>> rank = FIGURES["rank"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = rank.save(rank.compute(counts=(1, 2), samples=(1,)), folder)
        ...     "exceed their bound" in report(folder).read_text(encoding="utf-8")
        True
    """
    return judged_report(folder, output, title=title, claims=claims)[0]


def judged_report(
    folder: str | Path,
    output: str | Path | None = None,
    *,
    title: str = "",
    claims: Sequence[Claim] = CLAIMS,
) -> tuple[Path, list[Judged]]:
    """As :func:`report`; returns the verdicts too, so that they need not be found again."""
    folder = Path(folder)
    results = read_results(folder)
    if not results:
        raise DataError(f"{folder} holds no saved result of a figure.")
    verdicts = [(claim, claim.judge(results)) for claim in claims]
    page = render(
        figures=[_shown(name, result, folder) for name, result in results.items()],
        verdicts=verdicts,
        endings=endings(results),
        tables=read_tables(folder),
        title=title or "Practical Gauss-Newton: the paper's experiments, measured again",
    )
    path = folder / "index.html" if output is None else Path(output)
    write_whole(path, page.encode())
    return path, verdicts


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The results in a folder by name, in the order of the paper."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        if not path.name.endswith(_TABLE):
            result = load_json(path)
            if _of_a_figure(result):
                found[path.stem] = result
    order = list(FIGURES)
    return dict(sorted(found.items(), key=lambda item: (order.index(item[1]["figure"]), item[0])))


def read_tables(folder: Path) -> list[dict[str, Any]]:
    """The tables in a folder, by name."""
    found = [load_json(path) for path in sorted(folder.glob(f"*{_TABLE}"))]
    return [table for table in found if _has(table, ("title", "headers", "rows"))]


def _of_a_figure(result: Any) -> bool:
    """Whether it is ours: others may keep files in the same folder."""
    if not _has(result, ("figure",)) or not isinstance(result["figure"], str):
        return False
    kind = FIGURES.get(result["figure"])
    return kind is not None and _has(result, kind.keys)


def _has(found: Any, keys: Sequence[str]) -> bool:
    return isinstance(found, dict) and set(keys) <= set(found)


def render(
    *,
    figures: list[Shown],
    verdicts: list[Judged],
    endings: list[Ending],
    tables: list[dict[str, Any]],
    title: str,
) -> str:
    """The page as text."""
    jinja2 = require("jinja2", "the report")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    counts = {
        outcome: sum(verdict.outcome == outcome for _, verdict in verdicts)
        for outcome in ("held", "not held", "not measured")
    }
    page: str = template.render(
        figures=figures,
        verdicts=verdicts,
        endings=endings,
        tables=tables,
        title=title,
        counts=counts,
    )
    return page


def endings(results: dict[str, dict[str, Any]]) -> list[Ending]:
    """Where every run of every figure of progress ended, one row each."""
    rows: dict[tuple[str, str], Ending] = {}
    for result in results.values():
        for problem in result.get("problems", []):
            for run in problem["runs"]:
                updates, seconds, _ = run["points"][-1]
                each = 1000 * seconds / updates if updates else 0.0
                # The figure of the CPU shows some runs a second time, without their settings.
                rows.setdefault(
                    (problem["title"], run["title"].partition(":")[0]),
                    Ending(
                        problem["title"],
                        run["title"],
                        int(updates),
                        float(seconds),
                        final_loss(run),
                        each,
                    ),
                )
    return list(rows.values())


def _shown(name: str, result: dict[str, Any], folder: Path) -> Shown:
    kind = FIGURES[result["figure"]]
    svg = _read_svg(folder / f"{name}.svg") or as_svg(kind.draw(result), name)
    named = result.get("title", "")
    title = f"{kind.title}: {named}" if named else kind.title
    return Shown(name, title, kind.where, kind.caption(result), inline(svg, name, title))


def _read_svg(path: Path) -> str | None:
    """A drawing that is there, and whole."""
    if not path.exists():
        return None
    svg = path.read_text(encoding="utf-8", errors="replace")
    return svg if "<svg" in svg and svg.rstrip().endswith("</svg>") else None


def inline(svg: str, name: str, title: str) -> str:
    """An SVG file's text made fit to stand in a page beside others.

    Its ids get a name of their own, it takes the width it is given, and its ink is the colour of
    the page's text, so that it can be read on light and on dark.

    Example:
        >>> from gaussnewton.experiments.report import inline
        >>> svg = '<?xml version="1.0"?><svg width="9pt" height="4pt" viewBox="0 0 9 4">'
        >>> inline(svg + '<g id="a"/><use href="#a"/></svg>', "rank", "Ranks")
        '<svg role="img" aria-label="Ranks" viewBox="0 0 9 4"><g id="rank-a"/><use href="#rank-a"/></svg>'
    """  # noqa: E501
    svg = svg[svg.index("<svg") :]
    head, rest = svg.split(">", 1)
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    head = head.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
    rest = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', rest)
    rest = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', rest)
    rest = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", rest)
    return f"{head}>{rest.replace(INK, 'currentColor').strip()}"
