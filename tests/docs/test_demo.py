"""The programs that `make demo` compares: on ranks they learn what one process learns, and a difference is a failure."""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.launcher import needs_mpiexec, run_python

DEMO = Path(__file__).parents[2] / "docs" / "examples" / "demo.py"
DIGITS = [[0.9, 0.02, 0.5, 0.7], [0.4, 0.01, 0.3, 0.93]]
LINE = [[3.0, -1.0]]


@pytest.mark.skipif(not all(map(find_spec, ("sklearn", "tqdm"))), reason="no digits")
@needs_mpiexec
def test_two_ranks_learn_what_one_process_learns() -> None:
    # A law states of more numbers of ranks that the last program has the same bits.
    main = f"import runpy; main = runpy.run_path({str(DEMO)!r})['main']"
    main = f"{main}; main.__globals__['COUNTS'] = (1, 3); raise SystemExit(main())"
    job = run_python("-c", main, "--frameworks", "numpy", "--ranks", "2", "--epochs", "2")
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("\n  the same\n") == 2
    assert "The same bits." in job.stdout
    assert "Passed: 2 ranks learn what one process learns." in job.stdout


@pytest.mark.parametrize("printed", [None, LINE])
def test_a_program_that_fails_fails_the_demonstration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], printed: Any
) -> None:
    def numbers(program: str, *_: object) -> Any:
        if printed is None or program == "train_jax.py":
            raise subprocess.CalledProcessError(3, program)
        return printed if program == "train_any_framework.py" else DIGITS

    main = runpy.run_path(str(DEMO))["main"]
    monkeypatch.setitem(main.__globals__, "numbers", numbers)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--frameworks", "numpy,jax"])
    assert main() == 1
    said = capsys.readouterr().out
    assert said.count("FAILED: a program ended with status 3") == (3 if printed is None else 1)
    assert said.count("  the same\n") == (0 if printed is None else 2)
    assert "Passed" not in said
    monkeypatch.setattr(sys, "argv", ["demo.py", "--frameworks", "keras"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--frameworks are of numpy, torch, jax; got keras" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "several", "one", "said"),
    [
        ("train_torch.py", [DIGITS[0], [0.4001, 0.01, 0.3, 0.93]], DIGITS, ""),
        ("train_torch.py", [DIGITS[0], [0.402, 0.01, 0.3, 0.93]], DIGITS, "0.402 and 0.4"),
        ("train_torch.py", [[float("nan"), *DIGITS[0][1:]], DIGITS[1]], DIGITS, "nan and 0.9"),
        ("train_torch.py", DIGITS[1:], DIGITS, "the ranks printed"),
        ("train_torch.py", DIGITS[:1], DIGITS[:1], "the accuracy is under"),
        ("train_torch.py", [], [], "nothing was printed"),
        ("train_any_framework.py", LINE * 3, LINE, ""),
        ("train_any_framework.py", [*LINE * 2, [3.0, -1.0000001]], LINE, "different parameters"),
        ("train_any_framework.py", [[3.1, -1.0]] * 3, LINE, "3.1 and 3.0"),
        ("train_any_framework.py", [], LINE, "nothing was printed"),
    ],
)
def test_each_difference_is_a_failure(
    program: str, several: list[list[float]], one: list[list[float]], said: str
) -> None:
    found = runpy.run_path(str(DEMO))["verdict"](program, several, one)
    assert said in found
    assert bool(found) == bool(said)
