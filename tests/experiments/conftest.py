from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_folder_and_no_proxy_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GAUSSNEWTON_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
