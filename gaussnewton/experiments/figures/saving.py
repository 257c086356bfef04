"""A figure's result as JSON, and the figure itself as SVG and PNG, side by side in a folder."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaussnewton.errors import DataError
from gaussnewton.experiments.extra import require
from gaussnewton.experiments.writing import write_whole

if TYPE_CHECKING:
    import matplotlib.figure

_DOTS_PER_INCH = 150


def save(
    result: dict[str, Any], figure: matplotlib.figure.Figure, folder: str | Path, name: str
) -> dict[str, Path]:
    """Write ``name.json``, ``name.svg`` and ``name.png``; returns their paths by suffix.

    The same result gives the same SVG, byte by byte: no dates and no random names. Each file is
    there as a whole or not at all, and the JSON, which others go by, comes last.

    Example:
        >>> import tempfile
        >>> from gaussnewton.experiments.figures import rank, save
        >>> result = rank.compute(counts=(1, 2), samples=(1,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(p.name for p in save(result, rank.draw(result), folder, "rank").values())
        ['rank.json', 'rank.png', 'rank.svg']
    """
    contents = {
        "svg": as_svg(figure, name).encode(),  # first: drawing once may shift what is drawn next
        "png": _as_png(figure),
        "json": json.dumps(_finite(result), allow_nan=False).encode(),
    }
    paths = {suffix: Path(folder) / f"{name}.{suffix}" for suffix in contents}
    for suffix, content in contents.items():
        write_whole(paths[suffix], content)
    return paths


def _as_png(figure: matplotlib.figure.Figure) -> bytes:
    written = io.BytesIO()
    figure.savefig(written, dpi=_DOTS_PER_INCH, facecolor="white", format="png")
    return written.getvalue()


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

    Raises:
        DataError: if the file is damaged, or holds something else.
    """
    found = load_json(path)
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no result of a figure. Delete it, or move it elsewhere.")
    return found


def load_json(path: str | Path) -> Any:
    """What a JSON file holds, whoever wrote it.

    Raises:
        DataError: if it is damaged.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(
            f"{path} cannot be read: {error}. Delete it, and make it again if it was a figure."
        ) from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
