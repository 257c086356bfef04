"""A figure's result as JSON, and the figure itself as SVG and PNG, side by side in a folder."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaussnewton.experiments.extra import require

if TYPE_CHECKING:
    import matplotlib.figure

_DOTS_PER_INCH = 150


def save(
    result: dict[str, Any], figure: matplotlib.figure.Figure, folder: str | Path, name: str
) -> dict[str, Path]:
    """Write ``name.json``, ``name.svg`` and ``name.png``; returns their paths by suffix.

    The same result gives the same SVG, byte by byte: no dates and no random names.

    Example:
        >>> import tempfile
        >>> from gaussnewton.experiments.figures import rank, save
        >>> result = rank.compute(counts=(1, 2), samples=(1,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(p.name for p in save(result, rank.draw(result), folder, "rank").values())
        ['rank.json', 'rank.png', 'rank.svg']
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {suffix: folder / f"{name}.{suffix}" for suffix in ("json", "svg", "png")}
    paths["json"].write_text(json.dumps(_finite(result), allow_nan=False), encoding="utf-8")
    paths["svg"].write_text(as_svg(figure, name), encoding="utf-8")
    figure.savefig(paths["png"], dpi=_DOTS_PER_INCH, facecolor="white", format="png")
    return paths


def as_svg(figure: matplotlib.figure.Figure, name: str) -> str:
    """The figure as SVG text, on no background; ``name`` makes its ids its own."""
    matplotlib = require("matplotlib", "drawing figures")
    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "path"}):
        figure.savefig(
            written, format="svg", facecolor="none", metadata={"Date": None}, dpi=_DOTS_PER_INCH
        )
    return written.getvalue()


def load(path: str | Path) -> dict[str, Any]:
    """A saved result.

    Numbers that JSON does not have (NaN, infinity) come back as None.
    """
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no result of a figure")
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
