"""Data sets by name, what they need, and the real ones where a folder has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gaussnewton.errors import DataError, MissingDataError, MissingExtraError
from gaussnewton.experiments.data import NAMES, dataset, faces, load, mnist
from tests.experiments.files import Digits

FOLDER = os.environ.get("GAUSSNEWTON_DATA")


def test_curves_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    few = dataset.curves(count=10)
    monkeypatch.setattr(dataset, "curves", lambda: few)
    data = load("curves", folder="/nowhere")  # generated, so the folder does not matter
    assert data.name == "curves"
    assert data.images is few
    assert data.labels is None


@pytest.mark.parametrize("name", ["mnist", "faces"])
def test_files_are_looked_for_in_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=str(tmp_path)):
        load(name, tmp_path)


def test_unknown_name() -> None:
    with pytest.raises(DataError, match=f"no data set 'cifar'; there are {', '.join(NAMES)}"):
        load("cifar")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    install = r'pip install "gaussnewton\[experiments\]"'
    with pytest.raises(MissingExtraError, match=f"pooch is not installed.*{install}"):
        mnist()
    (tmp_path / "olivettifaces.mat").write_bytes(b"")
    with pytest.raises(MissingExtraError, match=rf"scipy\.io is not installed.*{install}"):
        faces(tmp_path)
    # A folder of MNIST files needs neither.
    digits = Digits.make()
    for file, data in digits.files().items():
        (tmp_path / file).write_bytes(data)
    assert len(mnist(tmp_path, **digits.sources())[0]) == 7


def test_the_library_itself_does_not_import_the_experiments() -> None:
    code = (
        "import sys, gaussnewton; "
        "print([m for m in ('gaussnewton.experiments', 'pooch', 'scipy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.skipif(not FOLDER, reason="GAUSSNEWTON_DATA names no folder with the real files")
def test_the_real_files() -> None:
    data = load("mnist", FOLDER)
    assert data.images.shape == (50_000, 784)
    assert data.labels is not None
    assert data.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert data.images.mean().item() == pytest.approx(0.131, abs=5e-4)
    x = faces(FOLDER, pairs=2)
    assert x.shape == (500, 625)
    assert 0.5 < x.mean() < 0.6
    assert x.dtype == torch.float32
