"""IDX, the format of the MNIST files."""

from __future__ import annotations

import gzip
import math
import struct
import zlib

import torch

from gaussnewton.errors import DataError
from gaussnewton.experiments.data.source import Decoded

UNSIGNED_BYTES = 0x08
GZIP_MAGIC = b"\x1f\x8b"


def decode_idx(data: bytes, name: str) -> Decoded:
    r"""An array of bytes in IDX format, packed by gzip or not.

    The format: two zero bytes, the type of the elements, the number of dimensions; each dimension
    as a big-endian 32-bit number; the elements, the last index running fastest.

    Returns:
        The array, and the unpacked file.

    Example:
        >>> from gaussnewton.experiments.data.idx import decode_idx
        >>> decode_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 5, 6, 7]), "example").values
        tensor([5, 6, 7], dtype=torch.uint8)
    """
    content = _unpack(data, name)
    rank = content[3] if len(content) > 3 else 0
    start = 4 + 4 * rank
    if content[:3] != bytes([0, 0, UNSIGNED_BYTES]) or len(content) < start:
        raise DataError(
            f"{name} is not an IDX file of bytes: it begins with 0x{content[:4].hex()}."
        )
    shape = struct.unpack(f">{rank}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{name} is cut off or too long: it announces an array of shape {shape}, "
            f"which is {math.prod(shape)} bytes, and has {len(content) - start}."
        )
    # A bytearray, because torch wants memory that may be written to.
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start)
    return Decoded(values.view(shape), content)


def _unpack(data: bytes, name: str) -> bytes:
    if not data.startswith(GZIP_MAGIC):
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{name} is cut off or damaged: gzip says {str(error)!r}.") from error
