"""What a file of a data set is: its name, its content's checksum, and where it can be had."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gaussnewton.errors import DataError


class Decoded(NamedTuple):
    """What is in a file: the numbers, and the bytes whose checksum tells that they are right."""

    values: Tensor
    content: bytes


Decoder = Callable[[bytes, str], Decoded]
"""From a file's bytes, and its name for messages, to what is in it."""


@dataclass(frozen=True)
class Mirror:
    """A public address of a file.

    Args:
        url: the address.
        sha256: the file's own checksum, where it is known; it is checked before decoding.
    """

    url: str
    sha256: str | None = None


@dataclass(frozen=True)
class Source:
    """One file of a data set.

    The checksum that counts is that of the content, because the same content is found packed or
    saved in different ways, and so in different files.

    Args:
        file: its name, in a user's folder and in the cache.
        sha256: the checksum of the decoded content.
        decode: how to read it.
        mirrors: where to download it, the first choice first.
    """

    file: str
    sha256: str
    decode: Decoder
    mirrors: tuple[Mirror, ...] = ()

    def read(self, data: bytes, name: str) -> Tensor:
        """The numbers in a file's bytes.

        Raises:
            DataError: if they cannot be decoded, or are not those that were pinned.
        """
        values, content = self.decode(data, name)
        check_sum(content, self.sha256, f"the content of {name}")
        return values


def check_sum(data: bytes, sha256: str, name: str) -> None:
    """Raise unless bytes have this SHA-256 checksum.

    Example:
        >>> import hashlib
        >>> from gaussnewton.experiments.data.source import check_sum
        >>> check_sum(b"abc", hashlib.sha256(b"abc").hexdigest(), "abc")
    """
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise DataError(
            f"the checksum of {name} is wrong: SHA-256 {found}, expected {sha256}. "
            "The file is damaged or is another one."
        )
