"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


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
    # No NamedTemporaryFile as a context: a file of the right name must never be a part.
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
