"""Cells that fail on some ranks, and the recipe of docs/running.md after them; see `test_recovery.py`.

Each argument is how a cell fails, which rank fails, and how many cells there are, with commas between.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

import arraycomm as ac

X = np.ones(2)


def in_its_own_code(comm: ac.Communicator, fails: bool) -> None:
    if fails:
        raise KeyError("data")
    comm.allreduce(X, timeout=0.3)


def by_an_argument(comm: ac.Communicator, fails: bool) -> None:
    comm.allreduce({"a": 1} if fails else X)  # type: ignore[type-var]


def by_other_calls(comm: ac.Communicator, fails: bool) -> None:
    comm.allreduce(np.ones(2 + fails))


def on_a_duplicate(comm: ac.Communicator, fails: bool) -> None:
    by_other_calls(comm.dup(), fails)


def in_a_message_that_never_comes(comm: ac.Communicator, fails: bool) -> None:
    if fails:
        comm.recv((comm.rank + 1) % comm.size, timeout=0.3)


def too_late(comm: ac.Communicator, fails: bool) -> None:
    time.sleep(0.6 * fails)
    comm.allreduce(X, timeout=0.3)


def in_a_function_of_its_own(comm: ac.Communicator, fails: bool) -> None:
    def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        raise ArithmeticError

    comm.allreduce(X, ac.op(add))


HOWS: dict[str, Callable[[ac.Communicator, bool], None]] = {
    how.__name__: how
    for how in (
        in_its_own_code,
        by_an_argument,
        by_other_calls,
        on_a_duplicate,
        in_a_message_that_never_comes,
        too_late,
        in_a_function_of_its_own,
    )
}


def meet(folder: Path, cell: str, comm: ac.Communicator) -> None:
    """Wait until every rank has ended a cell: the next one begins on all engines together."""
    (folder / f"{cell}-{comm.rank}").touch()
    while len(list(folder.glob(f"{cell}-*"))) < comm.size:
        time.sleep(0.01)


def run(folder: str, *rows: str) -> str:
    """Run the cells of each row, and recover after each; return what was seen."""
    comm = ac.init()
    for number, row in enumerate(rows):
        how, failing, cells = row.split(",")
        with suppress(Exception):
            HOWS[how](comm, comm.rank == int(failing) % comm.size)
        meet(Path(folder), f"{number}-first", comm)
        for _ in range(int(cells) - 1):
            with suppress(ac.ArrayCommError):
                comm.allreduce(np.full(2, 10.0), timeout=0.3)
        meet(Path(folder), f"{number}-last", comm)
        ac.finalize()
        comm = ac.init(timeout=30)
        assert comm.allreduce(X).tolist() == [comm.size] * 2, row
    return f"recovered {len(rows)} times"


if __name__ == "__main__":
    sys.stdout.write(run(*sys.argv[1:]) + "\n")
