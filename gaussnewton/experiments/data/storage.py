"""Where files are read from: a folder that the user names, or a cache filled by downloading."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from gaussnewton.errors import DataError, MissingDataError
from gaussnewton.experiments.data.download import default_cache, read_cached
from gaussnewton.experiments.data.source import Source

VARIABLE = "GAUSSNEWTON_DATA"
ADVICE = (
    "To download instead, name no folder, neither by --data nor in the environment variable "
    f"{VARIABLE}."
)


def read(
    sources: Sequence[Source], folder: str | Path | None = None, cache: Path | None = None
) -> list[Tensor]:
    """The content of the files of a data set.

    Args:
        sources: the files.
        folder: where they are. Without it, the folder that the environment variable
            ``GAUSSNEWTON_DATA`` names; without that, the cache. Nothing is written to a folder.
        cache: where downloads are kept; by default in the user's cache folder.

    Raises:
        DataError: if a file is missing, damaged, another one, or cannot be downloaded.
    """
    folder = folder or os.environ.get(VARIABLE)
    if not folder:
        cache = cache or default_cache()
        return [read_cached(source, cache) for source in sources]
    paths = _locate(sources, Path(folder).expanduser())
    return [_read_file(source, path) for source, path in zip(sources, paths, strict=True)]


def _read_file(source: Source, path: Path) -> Tensor:
    try:
        return source.read(path.read_bytes(), str(path))
    except DataError as error:
        raise DataError(f"{error} Replace the file. {ADVICE}") from error


def _locate(sources: Sequence[Source], folder: Path) -> list[Path]:
    found = [_variant(folder / source.file) for source in sources]
    missing = [source.file for source, path in zip(sources, found, strict=True) if path is None]
    if missing:
        what = "has no " + " and no ".join(missing) if folder.is_dir() else "is not a folder"
        raise MissingDataError(
            f"{folder} {what}. Expected there: {', '.join(source.file for source in sources)} "
            f"(a .gz file may also be unpacked). {ADVICE}"
        )
    return [path for path in found if path is not None]


def _variant(path: Path) -> Path | None:
    """The file, or the same unpacked."""
    unpacked = path.with_suffix("") if path.suffix == ".gz" else path
    return next((each for each in (path, unpacked) if each.is_file()), None)
