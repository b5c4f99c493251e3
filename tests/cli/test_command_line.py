"""The command line as a whole: its help, its version, and what it says of a wrong word."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import arraycomm as ac
from arraycomm import cli
from arraycomm.cli import launch
from arraycomm.cli.bench import command
from tests.support.launcher import needs_mpiexec

COMMANDS = sorted(cli._COMMANDS)


def ended(*words: str) -> Any:
    """Return the status with which the command line ends at once."""
    with pytest.raises(SystemExit) as stop:
        cli.main(list(words))
    return stop.value.code


def test_alone_it_prints_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended() == 0
    said = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n    {name} " in said


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--version") == 0
    assert capsys.readouterr().out == f"arraycomm {ac.__version__}\n"
    assert "__version__" in dir(ac)


def test_a_shell_gets_the_options_of_the_command_in_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[str]()
    library = ModuleType("argcomplete")
    library.autocomplete = lambda parser: asked.append(parser.parse_args(["run", "-n2", "x"]).words)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "argcomplete", library)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setenv("COMP_LINE", "arraycomm run --pre")
    ended()
    assert asked == [["run", "--pre"]]
    # Without the library the shell gets nothing.
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert ended() == 0


def test_it_ends_quietly_if_nobody_reads_on() -> None:
    unread, written = os.pipe()
    os.close(unread)
    with open(written, "wb") as nowhere:
        command = [sys.executable, "-m", "arraycomm"]
        # What is written at once argparse does not miss if it is lost.
        buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        done = subprocess.run(
            command, stdout=nowhere, stderr=subprocess.PIPE, env=buffered, check=False
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_fits_a_terminal_and_ends_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert ended(name, "--help") == 0
    said = capsys.readouterr().out
    assert f"\nexample:\n  arraycomm {name}" in said
    assert not [line for line in said.splitlines() if len(line) > 80 or line.endswith("-")]
    # However narrow it is, words stay whole.
    monkeypatch.setenv("COLUMNS", "30")
    assert ended(name, "--help") == 0
    assert sorted(capsys.readouterr().out.split()) == sorted(said.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fly"], "arraycomm: argument command: invalid choice: 'fly'"),
        (
            ["demo", "--ranks", "3"],
            "arraycomm: demo was removed; clone the repository, and run `make",
        ),
        (
            ["bench", "--device", "cuda"],
            "--device was removed; clone the repository, and run `array",
        ),
        (["bench", "--fast"], "arraycomm bench: unrecognized arguments: --fast"),
        (["bench", "--ranks", "x"], "must be a positive integer; got 'x'; see: arraycomm bench"),
        (["bench", "--repeats", "0"], "must be a positive integer; got '0'; see: arraycomm bench"),
        (["bench", "--sizes", "1K,q"], "'q' is not a number of bytes"),
    ],
    ids=" ".join,
)
def test_a_wrong_word_is_named_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(*words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_ctrl_c_ends_a_single_process_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "launch", interrupted)
    assert cli.main(["bench"]) == 130
    assert capsys.readouterr().err == "\nbench: ended by Ctrl-C\n"


@needs_mpiexec
def test_the_status_of_the_ranks_reaches_the_caller_of_the_launcher(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert launch.launch(2, ["bench", "--sizes", "q"]) == 2
    assert capfd.readouterr().err.count("'q' is not a number of bytes") == 2


def test_without_a_launcher_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: Any, *, mpi: bool) -> Any:
        raise ac.BackendUnavailableError("there is none")

    monkeypatch.setattr(launch, "find_launcher", missing)
    assert launch.launch(3, ["bench"], ", or sit down") == 127
    assert "there is none; install one with: pip install 'arraycomm[mpich]', or sit" in (
        capsys.readouterr().err
    )


def test_every_stream_will_do() -> None:
    """One that can print only ASCII, and ones that are closed."""
    command = [sys.executable, "-m", "arraycomm", "run", "--help"]
    said = subprocess.run(
        command,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "program [argument \\u2026]" in said.stdout
    line = 'exec "$@" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", line, "sh", *command], capture_output=True, check=True)
