"""More ranks than anybody has cores: 64 threads here, 16 processes in a job of their own."""

from __future__ import annotations

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm.testing import run
from tests.support.launcher import needs_mpiexec, run_python
from tests.support.on_ranks import alone, each_rank_of

EVERYTHING = """
import numpy as np


def check(comm):
    size, rank = comm.size, comm.rank
    for count in (1, 700, 5_000):
        x = np.arange(count) + rank
        ranks = np.arange(size)
        assert (comm.allreduce(x) == np.arange(count) * size + ranks.sum()).all()
        assert (comm.scan(x) == np.arange(count) * (rank + 1) + ranks[: rank + 1].sum()).all()
        assert (comm.allgather(x)[:, 0] == ranks).all()
        table = np.add.outer(ranks * 1000, np.arange(count)) + rank
        assert (comm.alltoall(table)[:, 0] == rank * 1000 + ranks).all()
        assert (comm.reduce_scatter(table)[0]) == size * rank * 1000 + ranks.sum()
        root = size // 2
        mine = comm.scatter(table if rank == root else None, root)
        assert mine[0] == rank * 1000 + root
        joined, counts = comm.allgatherv(x[: rank % 3], return_counts=True)
        assert counts == [min(r % 3, count) for r in range(size)] and len(joined) == sum(counts)
    part = comm.split(rank % 3, -rank)
    assert part.allreduce(1) == len(range(rank % 3, size, 3))
    got = comm.sendrecv(np.full(3000, rank), (rank + 1) % size, (rank - 1) % size)
    assert (got == (rank - 1) % size).all()
    assert comm.allgather_object(rank) == list(range(size))
"""


@alone
def test_64_threads() -> None:
    names: dict[str, object] = {}
    exec(EVERYTHING, names)
    run(64, names["check"])


@alone
@each_rank_of(64)
def test_mismatch_of_one_rank_of_64_is_named(comm: Communicator) -> None:
    with pytest.raises(
        ac.MismatchError, match=r"ranks 0–40, 42–63: allreduce.*; rank 41: allreduce"
    ):
        comm.allreduce(np.ones(3 if comm.rank != 41 else 4))


@needs_mpiexec
@pytest.mark.at_night
def test_16_processes() -> None:
    program = f"{EVERYTHING}\nimport arraycomm as ac\ncheck(ac.init())\nprint('right')"
    done = run_python("-c", program, ranks=16, timeout=200)
    assert done.stdout.count("right") == 16, done.stdout + done.stderr
