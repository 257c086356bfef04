"""A contender that sits out is not swept out of memory."""

import subprocess
import sys
from pathlib import Path

import pytest
from race import resident

ASK = """
import resident
before = open("/proc/self/status").read()
print(resident.stay_resident())
kept = bytearray(10_000_000)
after = open("/proc/self/status").read()
print(*(int(text.split("VmLck:")[1].split()[0]) for text in (before, after)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux what is locked")
def test_what_is_used_is_locked_where_the_system_allows_it():
    here = Path(resident.__file__).parent
    run = subprocess.run([sys.executable, "-c", ASK], cwd=here, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    answer, numbers = run.stdout.splitlines()
    before, after = map(int, numbers.split())
    assert before == 0
    assert (after > 9_000) is (answer == "True")  # KiB


def test_a_system_without_it_is_none(monkeypatch):
    monkeypatch.setattr(resident.ctypes, "CDLL", lambda *_, **__: object())
    assert resident.stay_resident() is False
