"""Files from a folder or a mirror: read when right, and refused in clear words when not."""

from __future__ import annotations

import gzip
import io
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch

from gaussnewton.errors import DataError, DownloadError, GaussNewtonError, MissingDataError
from gaussnewton.experiments.data import digits as pinned
from gaussnewton.experiments.data import mnist, portraits
from gaussnewton.experiments.data.idx import decode_idx
from gaussnewton.experiments.data.matlab import decode_faces
from gaussnewton.experiments.data.source import Mirror
from tests.experiments.files import Digits, Site, mat, mat_source, serve, sha256

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


@pytest.fixture
def digits() -> Digits:
    return Digits.make()


@pytest.fixture
def folder(tmp_path: Path, digits: Digits) -> Path:
    for name, data in digits.files().items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


@pytest.fixture
def site(digits: Digits) -> Iterator[Site]:
    with serve(digits.files()) as site:
        yield site


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "gaussnewton"


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def check(result: tuple[torch.Tensor, torch.Tensor], digits: Digits) -> None:
    images, labels = result
    torch.testing.assert_close(images, digits.images.view(-1, 784) / 255)
    assert images.dtype == torch.float32
    assert torch.equal(labels, digits.labels.long())


# From a folder.


def test_named_folder_and_folder_from_the_environment(
    folder: Path, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(folder)
    check(mnist(folder, **digits.sources()), digits)
    check(mnist(str(folder), **digits.sources()), digits)
    monkeypatch.setenv("GAUSSNEWTON_DATA", str(folder))
    check(mnist(**digits.sources()), digits)
    with pytest.raises(MissingDataError):  # what is named goes before the environment
        mnist(folder / "elsewhere", **digits.sources())
    assert contents(folder) == before


def test_unpacked_files_do_as_well(folder: Path, digits: Digits) -> None:
    (folder / IMAGES.removesuffix(".gz")).write_bytes(gzip.decompress(digits.files()[IMAGES]))
    (folder / IMAGES).unlink()
    check(mnist(folder, **digits.sources()), digits)


def test_packed_in_another_way_is_the_same_content(folder: Path, digits: Digits) -> None:
    other = gzip.compress(gzip.decompress(digits.files()[IMAGES]), compresslevel=1, mtime=1)
    assert other != digits.files()[IMAGES]
    (folder / IMAGES).write_bytes(other)
    check(mnist(folder, **digits.sources()), digits)


def test_missing_file_says_which_are_expected(folder: Path, digits: Digits) -> None:
    (folder / LABELS).unlink()
    with pytest.raises(MissingDataError) as caught:
        mnist(folder, **digits.sources())
    message = str(caught.value)
    assert f"{folder} has no {LABELS}." in message
    assert f"Expected there: {IMAGES}, {LABELS}" in message
    assert "--data" in message
    assert "GAUSSNEWTON_DATA" in message
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, GaussNewtonError)
    with pytest.raises(MissingDataError, match="nowhere is not a folder"):
        mnist(folder / "nowhere", **digits.sources())


def test_another_file_is_refused(folder: Path, digits: Digits) -> None:
    other = Digits(digits.images + 1, digits.labels)
    (folder / IMAGES).write_bytes(other.files()[IMAGES])
    expected = f"content of .*{IMAGES} is wrong: SHA-256 .* expected .* Replace .*--data"
    with pytest.raises(DataError, match=expected):
        mnist(folder, **digits.sources())


def test_the_pinned_sums_are_in_force(folder: Path) -> None:
    with pytest.raises(DataError, match=pinned.IMAGES.sha256):
        mnist(folder)
    (folder / "olivettifaces.mat").write_bytes(mat(torch.zeros(1, 64, 64, dtype=torch.uint8)))
    with pytest.raises(DataError, match=portraits.OLIVETTI.sha256):
        portraits.faces(folder)


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
def test_cut_off_gzip(folder: Path, digits: Digits, kept: float) -> None:
    data = digits.files()[IMAGES]
    (folder / IMAGES).write_bytes(data[: int(kept * len(data))])
    with pytest.raises(DataError, match=f"{IMAGES} is (cut off or damaged: gzip|not an IDX file)"):
        mnist(folder, **digits.sources())


def test_files_that_do_not_fit_each_other(folder: Path, digits: Digits) -> None:
    fewer = Digits(digits.images, digits.labels[:-1])
    (folder / LABELS).write_bytes(fewer.files()[LABELS])
    with pytest.raises(DataError, match=r"do not fit each other.*\(7, 28, 28\) and \(6,\)"):
        mnist(folder, **fewer.sources())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a.idx is not an IDX file of bytes"),
        (b"<html>not found</html>", "not an IDX file of bytes: it begins with 0x3c68746d"),
        (bytes([0, 0, 13, 1, 0, 0, 0, 1, 0]), "begins with 0x00000d01"),  # floats
        (bytes([0, 0, 8, 3, 0, 0, 0, 1]), "begins with 0x00000803"),  # ends in its header
        (bytes([0, 0, 8, 1, 0, 0, 0, 3, 5, 6]), r"cut off or too long.*\(3,\).*3 bytes.* has 2"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 1, 5, 6]), r"cut off or too long.*\(1,\).*1 bytes.* has 2"),
    ],
)
def test_files_that_are_not_idx(data: bytes, message: str) -> None:
    for packed in (data, gzip.compress(data)):
        with pytest.raises(DataError, match=message):
            decode_idx(packed, "a.idx")


def matlab(**variables: np.ndarray) -> bytes:
    file = io.BytesIO()
    scipy.io.savemat(file, variables)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a.mat cannot be read as a MATLAB file"),
        (b"<html>not found</html>" * 20, "a.mat cannot be read as a MATLAB file"),
        (matlab(images=np.ones((4096, 2))), "a.mat has no variable 'faces'"),
        (matlab(faces=np.ones((400, 4096))), r"\(400, 4096\) of float64, not 4096 pixels"),
        (matlab(faces=np.full((4096, 2), 0.5)), "values that are not bytes"),
    ],
)
def test_files_that_are_not_faces(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        decode_faces(data, "a.mat")


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_cut_off_matlab_file(kept: float) -> None:
    data = mat(torch.randint(256, (5, 64, 64), dtype=torch.uint8))
    with pytest.raises(DataError, match=r"a\.mat cannot be read.*it may be cut off"):
        decode_faces(data[: int(kept * len(data))], "a.mat")


def test_faces_saved_as_other_numbers_are_the_same_content() -> None:
    images = torch.randint(256, (5, 64, 64), dtype=torch.uint8)
    columns = images.numpy().transpose(2, 1, 0).reshape(4096, 5)
    for kind in ("uint8", "float64"):
        data = matlab(faces=columns.astype(kind))
        assert torch.equal(mat_source(images).read(data, "a.mat"), images)


# From a mirror.


def test_downloaded_once_with_a_progress_bar(
    site: Site, cache: Path, digits: Digits, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = digits.sources(site.address)
    check(mnist(cache=cache, **sources), digits)
    assert contents(cache) == [IMAGES, LABELS]
    shown = capsys.readouterr().err
    assert f"{LABELS}: 100%" in shown
    check(mnist(cache=cache, **sources), digits)
    assert site.asked == [IMAGES, LABELS]
    assert capsys.readouterr().err == ""


def test_damaged_cache_is_downloaded_again(site: Site, cache: Path, digits: Digits) -> None:
    sources = digits.sources(site.address)
    mnist(cache=cache, **sources)
    whole = (cache / IMAGES).read_bytes()
    (cache / IMAGES).write_bytes(whole[:100])
    check(mnist(cache=cache, **sources), digits)
    assert site.asked == [IMAGES, LABELS, IMAGES]
    assert (cache / IMAGES).read_bytes() == whole


def test_the_next_mirror_where_one_fails(site: Site, cache: Path, digits: Digits) -> None:
    sources = digits.sources(site.address + "/gone", site.address)
    check(mnist(cache=cache, **sources), digits)
    assert site.asked == [f"gone/{IMAGES}", IMAGES, f"gone/{LABELS}", LABELS]


def refused(cache: Path, sources: dict, *words: str) -> None:
    with pytest.raises(DownloadError) as caught:
        mnist(cache=cache, **sources)
    message = str(caught.value)
    assert message.startswith(f"{IMAGES} could not be downloaded")
    for word in (*words, sources["images"].mirrors[0].url, "--data", "GAUSSNEWTON_DATA"):
        assert word in message
    assert contents(cache) == []


def test_wrong_file(site: Site, cache: Path, digits: Digits) -> None:
    site.files[IMAGES] = Digits(digits.images + 1, digits.labels).files()[IMAGES]
    sources = digits.sources(site.address)
    refused(cache, sources, "the checksum of the file there is wrong", "expected")
    # Where the file's own sum is not known, the content's is.
    unknown = replace(sources["images"], mirrors=(Mirror(f"{site.address}/{IMAGES}"),))
    refused(cache, sources | {"images": unknown}, "the checksum of the content", "expected")


def test_connection_lost_in_the_middle(site: Site, cache: Path, digits: Digits) -> None:
    site.cut = True
    refused(cache, digits.sources(site.address), "IncompleteRead")


def test_cut_off_on_the_server(site: Site, cache: Path, digits: Digits) -> None:
    site.files[IMAGES] = cut = site.files[IMAGES][:1000]
    sources = digits.sources(site.address)
    mirrors = (Mirror(f"{site.address}/{IMAGES}", sha256(cut)),)
    sources["images"] = replace(sources["images"], mirrors=mirrors)
    refused(cache, sources, "is cut off or damaged")


def test_no_such_page(site: Site, cache: Path, digits: Digits) -> None:
    del site.files[IMAGES]
    refused(cache, digits.sources(site.address), "404")


def test_no_network(cache: Path, digits: Digits) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        refused(cache, digits.sources(address), "refused", "Check the network")


def test_nothing_half_written_where_the_disk_fails(
    site: Site, cache: Path, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DataError, match=f"{IMAGES} cannot be written: .*No space left"):
        mnist(cache=cache, **digits.sources(site.address))
    assert cache.is_dir()
    assert contents(cache) == []
