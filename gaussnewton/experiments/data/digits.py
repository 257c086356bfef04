"""MNIST: hand-written digits."""

from __future__ import annotations

from pathlib import Path

from jaxtyping import Float, Int64
from torch import Tensor

from gaussnewton.errors import DataError
from gaussnewton.experiments.data.idx import decode_idx
from gaussnewton.experiments.data.source import Mirror, Source
from gaussnewton.experiments.data.storage import read

COUNT = 50_000
SERVERS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


def _source(file: str, content: str, packed: str) -> Source:
    mirrors = tuple(Mirror(server + file, packed) for server in SERVERS)
    return Source(file, content, decode_idx, mirrors)


IMAGES = _source(
    "train-images-idx3-ubyte.gz",
    content="ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    packed="440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
)
LABELS = _source(
    "train-labels-idx1-ubyte.gz",
    content="65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    packed="3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
)


def mnist(
    folder: str | Path | None = None,
    *,
    images: Source = IMAGES,
    labels: Source = LABELS,
    cache: Path | None = None,
) -> tuple[Float[Tensor, "count pixels"], Int64[Tensor, " count"]]:
    """The first 50,000 images of MNIST, 28 × 28, one a row, in [0, 1]; and their digits.

    The paper leaves the other 10,000 for validation.

    Args:
        folder: holds ``train-images-idx3-ubyte.gz`` and ``train-labels-idx1-ubyte.gz``, packed
            or not. Without it, the folder of the environment variable ``GAUSSNEWTON_DATA``;
            without that, they are downloaded once and cached.
        images: the file of images.
        labels: the file of labels.
        cache: where downloads are kept; by default in the user's cache folder.

    Raises:
        DataError: if a file is missing, damaged, another one, or cannot be downloaded.

    Example:
        >>> from gaussnewton.experiments.data import mnist
        >>> images, labels = mnist()  # doctest: +SKIP
        >>> images.shape, labels[:3]  # doctest: +SKIP
        (torch.Size([50000, 784]), tensor([5, 0, 4]))
    """
    pictures, digits = read([images, labels], folder, cache)
    if pictures.ndim != 3 or digits.shape != pictures.shape[:1]:
        raise DataError(
            f"{images.file} and {labels.file} do not fit each other: arrays of shape "
            f"{tuple(pictures.shape)} and {tuple(digits.shape)}."
        )
    return pictures[:COUNT].flatten(1).float().div_(255), digits[:COUNT].long()
