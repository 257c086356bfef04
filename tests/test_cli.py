from __future__ import annotations

import subprocess
import sys

import pytest

from gaussnewton.cli import main


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("gaussnewton ")


@pytest.mark.parametrize("arguments", [[], ["demo", "--seconds", "none"], ["paint"]])
def test_bad_arguments_get_a_sentence(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "gaussnewton", "--version"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.startswith("gaussnewton ")
