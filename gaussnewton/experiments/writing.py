"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

PART = ".part"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that, whatever happens meanwhile, it is the old one or the new one.

    Its folder is made if need be.

    Example:
        >>> import pathlib, tempfile
        >>> from gaussnewton.experiments.writing import write_whole
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "new" / "file"
        ...     write_whole(path, b"all of it")
        ...     path.read_bytes()
        b'all of it'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, whose files nobody else may read.
    part = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def clear_parts(folder: Path) -> None:
    """Remove what processes that were killed left of files they were writing.

    Only for a folder in which nobody is writing now.
    """
    for part in folder.glob(f".*{PART}"):
        part.unlink(missing_ok=True)
