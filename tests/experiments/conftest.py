from __future__ import annotations

from functools import cache

import pytest

from gaussnewton.experiments import problems
from gaussnewton.experiments.data import curves

drawn_once = cache(curves)


@pytest.fixture(autouse=True)
def _no_folder_and_no_proxy_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GAUSSNEWTON_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(autouse=True)
def _the_same_images_need_not_be_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "curves", drawn_once)
