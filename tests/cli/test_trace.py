from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.cli import main
from arraycomm.testing import run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = str(tmp_path / "run.json")

    def calls(comm: ac.Communicator) -> None:
        with comm.trace(path):
            comm.allreduce(np.ones(2))
            comm.iallgather(np.ones(1 << 16)).wait()

    run(3, calls)
    return path


def test_command_prints_lines_and_who_waited(trace: str, capsys: Capture) -> None:
    assert main(["trace", trace]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{trace}: 9 calls of 3 ranks in ")
    assert any(line.split()[1:4] == ["allreduce", "header", "3"] for line in lines)
    assert any(line.split()[1:5] == ["allgather", "movement", "3", "1.6"] for line in lines)
    assert any(line.startswith("who waited  for rank 0") for line in lines)


def test_command_leaves_out_what_lies_outside(trace: str, capsys: Capture) -> None:
    assert main(["trace", trace, "--from", "1000", "--to", "1001"]) == 0
    assert capsys.readouterr().out.startswith(f"{trace}: 0 calls of 3 ranks")
    assert main(["trace", trace, "--from", "1000"]) == 2
    assert "--from must be less than" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run.png", "run.svg"])
def test_command_draws_a_picture(trace: str, name: str, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    picture = Path(trace).with_name(name)
    assert main(["trace", trace, "-o", str(picture)]) == 0
    assert capsys.readouterr().out.endswith(f"The timeline is drawn in {picture}.\n")
    begins = {"run.png": b"\x89PNG", "run.svg": b"<?xml"}[name]
    assert picture.read_bytes().startswith(begins)
    if name == "run.svg":
        text = picture.read_text("utf-8")
        assert all(f"rank {rank}" in text for rank in range(3))


def test_picture_that_cannot_be_drawn_says_why(trace: str, capsys: Capture) -> None:
    pytest.importorskip("matplotlib")
    assert main(["trace", trace, "-o", "run.unknown"]) == 2
    assert "trace: the picture could not be drawn: " in capsys.readouterr().err


def test_picture_without_matplotlib_says_what_to_install(
    trace: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["trace", trace, "-o", "run.png"]) == 2
    said = capsys.readouterr()
    assert "install it with: pip install 'arraycomm[plot]'" in said.err
    # What needs no picture is printed.
    assert "Bytes, waiting and transfer" in said.out


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("", "got no JSON"), ("[]", "got JSON of something else"), (None, "there is no file ")],
)
def test_file_that_is_no_trace_is_refused(
    text: str | None, wrong: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    assert main(["trace", str(path)]) == 2
    assert wrong in capsys.readouterr().err
