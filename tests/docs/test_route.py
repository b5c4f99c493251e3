"""What the documentation says of the files that a call enters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from arraycomm._native import compiled
from tests.support.launcher import is_open_mpi, needs_mpiexec, run_python

ROOT = Path(__file__).parents[2]


@needs_mpiexec
@pytest.mark.skipif(compiled is None or is_open_mpi(), reason="needs the native part, and MPICH")
def test_files_of_a_call_are_those_of_the_architecture() -> None:
    done = run_python("-m", "tests.support.route", ranks=2, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (entered,) = re.findall(r"^first call of 64 MB: (.*)$", done.stdout, re.MULTILINE)
    said = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert ", ".join(f"`{name}`" for name in entered.split(", ")) in said
