from __future__ import annotations

import pytest

from gaussnewton.cli import main


def test_demo_ends_below_adam(capsys) -> None:
    from gaussnewton.demo import demo

    losses = demo(updates=60, seed=0)
    ours = [h[-1] for name, h in losses.items() if "gn." in name]
    theirs = [h[-1] for name, h in losses.items() if "Adam" in name]
    assert (len(ours), len(theirs)) == (2, 3)
    assert max(ours) < min(theirs)
    assert "All as promised." in capsys.readouterr().out


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("gaussnewton ")


@pytest.mark.parametrize("arguments", [[], ["demo", "--updates", "none"], ["paint"]])
def test_bad_arguments_get_a_sentence(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "error:" in capsys.readouterr().err
