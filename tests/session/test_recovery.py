"""The recipe after an error, `finalize(); init()` on all ranks, whichever rank failed and how."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

import arraycomm as ac
from tests.session.recovering import HOWS, run
from tests.support.launched import ROOT
from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python
from tests.support.pairwise import pairwise

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")

# How many ranks there are, how the first cell fails, on the first or on the last rank, and how many cells there are.
TABLE = pairwise(product((2, 3), HOWS, (0, -1), (1, 2)))


def rows(ranks: int) -> list[str]:
    return [f"{how},{rank},{cells}" for size, how, rank, cells in TABLE if size == ranks]


def recovered(ranks: int) -> str:
    return f"recovered {len(rows(ranks))} times"


@needs_mpiexec
@pytest.mark.each_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_over_mpi_recover(ranks: int, tmp_path: Path) -> None:
    program = ("-m", "tests.session.recovering")
    done = run_python(*program, str(tmp_path), *rows(ranks), ranks=ranks, cwd=ROOT, timeout=100)
    assert done.stdout.count(recovered(ranks)) == ranks, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_recover(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    found = ac.launch(lambda comm: run(str(tmp_path), *rows(ranks)), ranks)
    assert found == [recovered(ranks)] * ranks
