"""The table of docs/failures.md: ways to end, ways to start, and what the other ranks do meanwhile."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import ROOT, start_numbered
from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python
from tests.support.pairwise import EVERY

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")

# What Python ends with.
EXITS = {
    "raise": 7,
    "exit": 8,
    "early": 9,
    "os": os.EX_USAGE,
    "text": 1,
    "in atexit": 0,
    "in a thread": 0,
}
FAILS = {
    "error": 1,
    "other hook": 1,
    "hook exits": 5,
    "hook fails": 1,
    "chained hook": 1,
    "inspects": 1,
}
STATES = {"in its own code": 0, "at the end": 0, "handles it": 3, "in a call": 1}
STATUSES = EXITS | FAILS | STATES
EXITING = (*EXITS, "in its own code", "at the end", "handles it")
FAILING = (*FAILS, "raise", *STATES)
SOME = ("other hook", "hook exits", "exit", "in a call", "at the end", "handles it")


def expected(roles: tuple[str, ...], *, over_mpi: bool) -> dict[int, int]:
    """Return the statuses: a job in which a rank fails ends well on none, if MPI connects them."""
    fails = "in a call" in roles or not set(roles).isdisjoint(FAILS)
    return {rank: STATUSES[role] or int(over_mpi and fails) for rank, role in enumerate(roles)}


# Keeps the status of its program, and ends once all have: launchers end all ranks after the first that fails.
WRAPPER = """
import os, sys, time
rank = next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
folder, size, *command = sys.argv[1:]
status = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, *command])
open(f"{folder}/{rank}", "w").write(str(status))
while sum(bool(open(f"{folder}/{name}").read()) for name in os.listdir(folder)) < int(size): time.sleep(0.1)
"""
PROGRAM = ("-m", "tests.session.ending")


def by_mpiexec(roles: tuple[str, ...], folder: Path, *further: str) -> tuple[dict[int, int], str]:
    arguments = (str(folder), str(len(roles)), *PROGRAM, *roles, *further)
    done = run_python("-c", WRAPPER, *arguments, ranks=len(roles), cwd=ROOT, timeout=60)
    statuses = {int(file.name): int(file.read_text()) for file in folder.iterdir()}
    return statuses, done.stdout + done.stderr


def with_mpi4py_first(roles: tuple[str, ...], folder: Path) -> tuple[dict[int, int], str]:
    return by_mpiexec(roles, folder, "mpi4py first")


def by_run(roles: tuple[str, ...], folder: Path) -> tuple[dict[int, int], str]:
    job = ("-m", "arraycomm", "run", "-n", str(len(roles)), *PROGRAM, *roles)
    done = run_python(*job, cwd=ROOT, timeout=60)
    statuses = dict.fromkeys(range(len(roles)), 0)
    for ranks, status in re.findall(r"ranks? ([\d, ]+) ended with status (\d+)", done.stderr):
        statuses |= dict.fromkeys(map(int, ranks.split(",")), int(status))
    return statuses, done.stdout + done.stderr


def by_variables(roles: tuple[str, ...], folder: Path) -> tuple[dict[int, int], str]:
    job, statuses = start_numbered(len(roles), *PROGRAM, *roles)
    return dict(enumerate(statuses)), job.stdout


Start = Callable[[tuple[str, ...], Path], tuple[dict[int, int], str]]


def jobs() -> list[Any]:
    """Return many ranks at once for each way to start; with EVERY=1 each pair for each."""
    pairs = list(product(STATES, EXITS | FAILS))
    starts: dict[Start, tuple[tuple[str, ...], list[pytest.MarkDecorator]]] = {
        by_mpiexec: (FAILING, [needs_mpiexec, pytest.mark.each_mpi]),
        with_mpi4py_first: (SOME, [needs_mpiexec, pytest.mark.each_mpi]),
        by_run: (EXITING, [needs_mpiexec]),
        by_variables: (SOME, []),
    }
    return [
        pytest.param(start, roles, marks=marks, id=f"{start.__name__}: {', '.join(roles)}")
        for start, (many, marks) in starts.items()
        for roles in (pairs if EVERY else [many])
    ]


@pytest.mark.parametrize(("start", "roles"), jobs())
def test_each_rank_ends_with_the_status_of_its_program(
    start: Start, roles: tuple[str, ...], tmp_path: Path
) -> None:
    statuses, said = start(roles, tmp_path)
    assert statuses == expected(roles, over_mpi=start is not by_variables), said
    assert "initializing or after finalizing" not in said
