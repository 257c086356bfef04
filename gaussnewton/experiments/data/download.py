"""Downloading files into a cache that only ever holds whole and checked ones."""

from __future__ import annotations

import io
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from gaussnewton.errors import DataError, DownloadError
from gaussnewton.experiments.data.source import Mirror, Source, check_sum
from gaussnewton.experiments.extra import require
from gaussnewton.experiments.writing import write_whole

TIMEOUT = 30  # seconds without a byte


def default_cache() -> Path:
    """The user's cache folder, by the custom of the operating system."""
    return Path(require("pooch", "downloading data").os_cache("gaussnewton"))


def read_cached(source: Source, cache: Path) -> Tensor:
    """The content of a file, from the cache if it is there and whole, else downloaded into it."""
    path = cache / source.file
    if path.is_file():
        try:
            return source.read(path.read_bytes(), str(path))
        except DataError:
            pass  # damaged since it was written: a download replaces it
    values, data = _download(source)
    _write(path, data)
    return values


def _download(source: Source) -> tuple[Tensor, bytes]:
    """From the first mirror that gives the right content."""
    failures = []
    for mirror in source.mirrors:
        try:
            data = _fetch(mirror, source.file)
            return source.read(data, mirror.url), data
        except (OSError, DataError) as error:  # the errors of requests are OSErrors
            failures.append(f"  {mirror.url}: {error}")
    raise DownloadError(
        f"{source.file} could not be downloaded:\n"
        + "\n".join(failures)
        + "\nCheck the network and try again, or get the file in another way, put it into a "
        "folder, and name that by --data or in the environment variable GAUSSNEWTON_DATA."
    )


def _fetch(mirror: Mirror, file: str) -> bytes:
    """The bytes at an address, with a progress bar.

    They are kept in memory, so that an interrupted download leaves nothing on disk.
    """
    # Without compression on the way: the checksum is of the file as it lies there.
    plain = {"Accept-Encoding": "identity"}
    buffer = io.BytesIO()
    # Some total, because a bar without one has no truth value; pooch sets the right one.
    with tqdm(desc=file, total=1, unit="B", unit_scale=True) as bar:
        downloader = require("pooch", "downloading data").HTTPDownloader(
            progressbar=bar, chunk_size=2**16, timeout=TIMEOUT, headers=plain
        )
        downloader(mirror.url, buffer, None)
    data = buffer.getvalue()
    if mirror.sha256:
        check_sum(data, mirror.sha256, "the file there")
    return data


def _write(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}.") from error
