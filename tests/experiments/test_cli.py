"""The command, as it is typed."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gaussnewton.cli import main
from gaussnewton.experiments.commands import COMMANDS
from gaussnewton.experiments.config import configure
from gaussnewton.experiments.live import Bar, Lines, duration, watcher
from gaussnewton.experiments.methods import METHODS
from gaussnewton.experiments.problems import PROBLEMS
from gaussnewton.experiments.record import Result


def ended(arguments: list[str]) -> int:
    """The exit status, whichever way it comes."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_help_names_all_there_is(capsys: pytest.CaptureFixture) -> None:
    assert ended(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"    {name} " in text for name in COMMANDS)
    assert "GAUSSNEWTON_DATA" in text
    for command in COMMANDS:
        assert ended([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert "example" in text
        if command in ("train", "compare"):
            assert all(f"\n  {name} " in text for name in [*PROBLEMS, *METHODS])
        assert max(map(len, text.splitlines())) <= 100


def test_train_records_and_does_not_repeat(out: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["train", "tiny", "adam:rate=2^-6", "--updates", "3", "--seed", "5"]
    arguments += ["--threads", "1"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    folder = out / "tiny" / "adam,rate=2^-6,seed=5"
    assert json.loads((folder / "config.json").read_text())["seed"] == 5
    assert "finished after 3 updates" in first
    assert "\r" not in first  # no bar where nobody watches
    assert main(arguments[:-2]) == 0  # the threads are those of the run that is there
    assert "(recorded before)" in capsys.readouterr().out


def test_compare_shows_all_side_by_side(out: Path, capsys: pytest.CaptureFixture) -> None:
    common = ["--updates", "2", "--out", str(out / "here"), "--batch", "50"]
    assert main(["compare", "tiny", "sgd", "kfra", "sgd", *common]) == 0
    text = capsys.readouterr().out
    assert {path.name for path in (out / "here" / "tiny").iterdir()} == {"sgd", "kfra"}
    rows = [line for line in text.splitlines() if line.endswith("finished")]
    assert [row.split()[0] for row in rows] == ["SGD", "KFRA"]


def test_search_ranks(out: Path, capsys: pytest.CaptureFixture) -> None:
    grid = ["--methods", "sgd,adam", "--rates", "2^-7,1e38", "--decays", "1"]
    assert main(["search", "tiny", "--updates", "3", *grid, "--top", "1"]) == 0
    text = capsys.readouterr().out
    assert "4 of 4 runs have ended, 2 of them diverged." in text
    assert text.splitlines()[-1].split()[:4] == ["1", "Adam", "2^-7", "3"]
    assert len(list((out / "tiny" / "search").iterdir())) == 4


def test_what_was_recorded_is_said_where_it_is_more_than_asked(
    out: Path, capsys: pytest.CaptureFixture
) -> None:
    train = ["train", "tiny", "sgd", "--threads", "1"]
    assert main([*train, "--seconds", "0.005"]) == 0
    capsys.readouterr()
    assert main([*train, "--seconds", "0.005"]) == 0
    assert "(recorded before)" in capsys.readouterr().out
    update = json.loads((out / "tiny" / "sgd" / "result.json").read_text())["update"]
    assert main([*train, "--updates", str(update + 20)]) == 0
    said = capsys.readouterr().out
    assert f"SGD: goes on from update {update}\nSGD: finished after {update + 20} updates" in said
    assert main([*train, "--updates", "2"]) == 0
    said = capsys.readouterr().out
    assert f"SGD: finished after {update + 20} updates" in said
    assert "(recorded before; asked: 2 updates)" in said


@pytest.mark.usefixtures("out")
def test_compare_ends_where_asked(capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "tiny", "sgd", "--updates", "8"]) == 0
    assert main(["compare", "tiny", "sgd", "adam", "--updates", "4"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.endswith("finished")]
    assert [row.split()[-6] for row in rows[-2:]] == ["4", "4"]
    assert not any("–" in row for row in rows)


def test_a_search_says_what_its_runs_end_by(out: Path, capsys: pytest.CaptureFixture) -> None:
    grid = ["--methods", "sgd", "--rates", "2^-7", "--decays", "1"]
    assert main(["search", "tiny", "--updates", "3", "--seconds", "50", *grid]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1 runs of 3 updates or 50 s, whichever comes first, below ")
    # The run went further than is asked now, and its place is that of where it was then.
    (folder,) = (out / "tiny" / "search").iterdir()
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[1])
    lines = (folder / "config.json").read_text()
    assert '"updates": 3' in lines
    assert main(["search", "tiny", "--updates", "3", "--seconds", "1e-9", *grid]) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[4:6] == [f"{first['loss']:.4g}", "1"]


def test_damaged_files_get_a_sentence(out: Path, capsys: pytest.CaptureFixture) -> None:
    train = ["train", "tiny", "sgd", "--updates"]
    assert main([*train, "2"]) == 0
    capsys.readouterr()
    path = out / "tiny" / "sgd" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:1000])
    assert main([*train, "3"]) == 2
    said = capsys.readouterr().err
    assert "runs/tiny/sgd/checkpoint.pt cannot be read" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "tinny", "adam"], "no problem 'tinny'; did you mean 'tiny'"),
        (["train", "tiny", "adem"], "no method 'adem'; did you mean 'adam'"),
        (["train", "tiny", "adam:speed=2"], "no setting of adam 'speed'"),
        (["train", "tiny", "adam:rate=-1"], "'-1' is not above zero"),
        (["train", "tiny", "adam", "--updates", "-4"], "'-4' is not a whole number above zero"),
        (["train", "tiny", "adam", "--seconds", "0"], "'0' is not above zero"),
        (["train", "tiny", "adam", "--seed", "-1"], "'-1' is not a whole number, zero or more"),
        (["train", "tiny", "adam", "--seed", "9" * 23], "is not below 2^63"),
        (["demo", "--seed", "9" * 23], "is not below 2^63"),
        (["reproduce", "surface", "--seed", "9" * 23], "is not below 2^63"),
        (["train", "tiny", "adam", "--threads", "9" * 11], "threads must be at most 4096"),
        (["search", "tiny", "--threads", "9" * 11], "threads must be at most 4096"),
        (["train", "tiny", "adam", "--updates", "9" * 400], "is not below 2^63"),
        (["train", "tiny", "adam", "--batch", "2000"], "batches of 2000 cannot be taken"),
        (["train", "mnist", "adam", "--data", "/nowhere"], "/nowhere is not a folder"),
        (["train", "faces", "adam", "--data", "."], "has no olivettifaces.mat"),
        (["train", "tiny"], "required: METHOD"),
        (["compare", "tiny", "adam", "kfrac"], "no method 'kfrac'"),
        (["search", "tiny", "--methods", "kfra"], "kfra has no learning rate"),
        (["search", "tiny", "--rates", "2^-6,x"], "'x' is not a number"),
        (["search", "tiny", "--decays", "3"], "above 0 and up to 1"),
        (["search", "tiny", "--seconds", "0.05"], "with --seconds say --updates too"),
        (["search", "tiny", "--out", "/dev/null"], "/dev/null"),
        (["paint"], "invalid choice: 'paint'"),
    ],
)
def test_bad_arguments_get_a_sentence(
    arguments: list[str], sentence: str, out: Path, capsys: pytest.CaptureFixture
) -> None:
    assert ended(arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_a_missing_extra_gets_a_sentence(
    monkeypatch: pytest.MonkeyPatch, out: Path, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert main(["train", "mnist", "adam"]) == 2
    assert 'pip install "gaussnewton[experiments]"' in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.usefixtures("out")
def test_training_needs_no_extra() -> None:
    code = (
        "import sys\n"
        "for name in ('pooch', 'scipy', 'matplotlib', 'jinja2'): sys.modules[name] = None\n"
        "from gaussnewton.cli import main\n"
        "sys.exit(main(['train', 'tiny', 'adam', '--updates', '1', '--threads', '1']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "finished after 1 updates" in run.stdout


def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    """The bar moves, Ctrl-C ends it with a sentence, and nothing is lost."""
    code = "import sys; from gaussnewton.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "train", "tiny", "kfra", "--out", str(tmp_path)]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    os.close(theirs)
    text, asked = "", False
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                text += os.read(ours, 4096).decode(errors="replace")
            except OSError:  # the other side is closed
                break
            if "/200" in text and not asked:
                process.send_signal(signal.SIGINT)
                asked = True
        assert process.wait(timeout=30) == 130, text
    finally:
        process.kill()
        os.close(ours)
    assert "Traceback" not in text
    assert "goes on from there" in text
    assert "τ" in text
    assert (tmp_path / "tiny" / "kfra" / "checkpoint.pt").exists()
    assert not (tmp_path / "tiny" / "kfra" / "result.json").exists()


def test_lines_now_and_then() -> None:
    stream = io.StringIO()
    assert isinstance(watcher(stream), Lines)
    shown = Lines(stream, every=0.0)
    shown.begin(configure("tiny", "kfra", updates=8), 0, 0.0)
    shown.line({"update": 2, "seconds": 1.0, "loss": 5.0, "averaged_loss": 4.0, "tau": 0.25})
    shown.end(Result("stopped", 2, 1.0, 5.0, 4.0))
    first, last = stream.getvalue().splitlines()
    assert first.startswith("KFRA: loss 4  2/8  ")
    assert first.endswith("left  τ 0.25")
    assert last.startswith("KFRA: stopped after 2 updates in 1.0 s, loss 4 with averaged")
    assert last.endswith(", 5 without")


def test_the_bar_is_cut_to_the_terminal() -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    stream = Terminal()
    shown = watcher(stream)
    assert isinstance(shown, Bar)
    shown.begin(configure("tiny", "adam", seconds=4.0), 0, 0.0)
    shown.line({"update": 3, "seconds": 2.0, "batch_loss": 7.5})
    shown.bar.refresh()
    shown.end(Result("finished", 6, 4.0, 7.0))
    assert " 50% |████    | Adam: loss 7.5  update 3  " in stream.getvalue()
    assert stream.getvalue().endswith("Adam: finished after 6 updates in 4.0 s, loss 7\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10 s"), (59.7, "1 min 00 s"), (3599.9, "1 h 00 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
