"""FACES: what a patch is, and which patches there are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gaussnewton.experiments.data import faces
from gaussnewton.experiments.data.matlab import decode_faces
from gaussnewton.experiments.data.patches import patches
from tests.experiments.files import mat, mat_source


def photographs(count: int) -> Tensor:
    return torch.randint(256, (count, 64, 64), dtype=torch.uint8)


def stored(folder: Path, images: Tensor) -> Path:
    (folder / "olivettifaces.mat").write_bytes(mat(images))
    return folder


@pytest.mark.parametrize("turns", [-1, 0, 1, 2])
def test_patches_turn_counter_clockwise(turns: int) -> None:
    image = torch.rand(64, 64)
    (patch,) = patches(image, torch.tensor([90.0 * turns]), torch.ones(1), side=64, samples=1)
    torch.testing.assert_close(patch, image.rot90(turns), atol=1e-4, rtol=0)


def test_patches_magnify_the_middle() -> None:
    image = torch.rand(64, 64)
    (patch,) = patches(image, torch.zeros(1), torch.tensor([2.0]), side=32, samples=1)
    torch.testing.assert_close(patch, image[16:48, 16:48], atol=1e-4, rtol=0)


def test_pixels_of_a_patch_are_means() -> None:
    image = torch.rand(64, 64)
    (patch,) = patches(image, torch.zeros(1), torch.ones(1), side=16, samples=4)
    expected = torch.nn.functional.avg_pool2d(image[None], 4)[0]
    torch.testing.assert_close(patch, expected, atol=1e-4, rtol=0)


def test_fine_stripes_do_not_alias() -> None:
    stripes = (torch.arange(64) % 2).float().expand(64, 64).contiguous()
    angles, scales = torch.linspace(-90, 90, 50), torch.full((50,), 1.4)
    smooth = patches(stripes, angles, scales, side=25)
    rough = patches(stripes, angles, scales, side=25, samples=1)
    assert smooth.std() < 0.5 * rough.std()
    assert (smooth.mean() - 0.5).abs() < 0.02


def test_photographs_are_upright(tmp_path: Path) -> None:
    image = torch.zeros(64, 64, dtype=torch.uint8)
    image[:20, :] = 200  # a bright top
    image[:, :5] = 100  # and a grey left side
    decoded = decode_faces(mat(image[None]), "example").values
    assert torch.equal(decoded, image[None])
    # As the format is described: the first 64 numbers of a column are the image's first column.
    assert decoded[0, :, 0].unique().tolist() == [100]
    source = mat_source(image[None])
    patch = faces(stored(tmp_path, image[None]), source=source, pairs=400).view(-1, 25, 25)
    # Turned by at most a quarter, so on the mean the top stays above.
    assert patch[:, :8].mean() > patch[:, -8:].mean() + 0.1


def test_shape_order_range_and_seeds(tmp_path: Path) -> None:
    images = photographs(3)
    images[1] = 51
    folder, source = stored(tmp_path, images), mat_source(images)
    before = torch.get_rng_state()
    x = faces(folder, source=source, pairs=5)
    assert torch.equal(before, torch.get_rng_state())
    assert x.shape == (15, 625)
    assert x.dtype == torch.float32
    assert x.min() >= 0
    assert x.max() <= 1
    torch.testing.assert_close(x[5:10], torch.full((5, 625), 0.2))
    assert x[:5].std() > 0.05
    assert torch.equal(x, faces(folder, source=source, pairs=5))
    assert not torch.equal(x, faces(folder, source=source, pairs=5, seed=1))


def test_only_the_first_25_people(tmp_path: Path) -> None:
    images = torch.zeros(270, 64, 64, dtype=torch.uint8)
    images[249], images[250:] = 102, 255
    x = faces(stored(tmp_path, images), source=mat_source(images), pairs=2)
    assert x.shape == (500, 625)
    torch.testing.assert_close(x[-2:], torch.full((2, 625), 0.4))
    assert not x[:-2].any()


def test_rotations_and_magnifications_fill_their_ranges(tmp_path: Path) -> None:
    """On a ramp, a patch's slope tells its magnification and the slope's direction its angle."""
    ramp = (2 * torch.arange(64, dtype=torch.uint8)).expand(1, 64, 64).contiguous()
    patch = faces(stored(tmp_path, ramp), source=mat_source(ramp)).view(-1, 25, 25)
    assert len(patch) == 414
    right = (patch[:, 12, 18] - patch[:, 12, 6]) / 12
    up = (patch[:, 6, 12] - patch[:, 18, 12]) / 12
    angles = torch.atan2(up, right) * 180 / math.pi
    scales = (2 / 255) * (64 / 25) / torch.hypot(up, right)
    for found, low, high in ((angles, -90.0, 90.0), (scales, 1.4, 1.8)):
        width = high - low
        assert low - 1e-3 * width < found.min() < low + 0.02 * width
        assert high - 0.02 * width < found.max() < high + 1e-3 * width
        assert (found.mean() - (low + high) / 2).abs() < 0.05 * width
    assert torch.corrcoef(torch.stack([angles, scales]))[0, 1].abs() < 0.15


def test_patches_have_no_empty_corners(tmp_path: Path) -> None:
    """Outside the photograph there would be black; a white one shows none."""
    white = torch.full((1, 64, 64), 255, dtype=torch.uint8)
    x = faces(stored(tmp_path, white), source=mat_source(white))
    assert x.min() > 0.999
