from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # the tests are small, and several run side by side


@pytest.fixture(autouse=True)
def _same_random_numbers_for_each_test() -> None:
    torch.manual_seed(0)
