from __future__ import annotations

import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator


@pytest.mark.parametrize("length", [0, 10, 200, 5_000, 3_000_000])
def test_objects_of_different_sizes(on_ranks, size, length) -> None:
    def check(comm: Communicator) -> None:
        objects = [
            {"rank": r, "text": "x" * (length if r == comm.size - 1 else r)}
            for r in range(comm.size)
        ]
        assert comm.allgather_object(objects[comm.rank]) == objects
        for root in range(comm.size):
            mine = objects[root] if comm.rank == root else None
            got = comm.bcast_object(mine, root)
            assert got == objects[root]
            assert got is not mine or mine is None

    on_ranks(size, check)


def test_statistics_count_calls_bytes_and_copies(on_ranks, size) -> None:
    import numpy as np

    def check(comm: Communicator) -> None:
        x = np.ones((100, 100))
        comm.allreduce(x)
        comm.allreduce(x.T)
        comm.allreduce(x[:1, :3].copy())
        comm.allreduce(x[:1, :3].copy())
        numbers = comm.stats()["allreduce"]
        assert numbers["calls"] == 4
        assert numbers["bytes"] == 2 * x.nbytes + 48
        assert numbers["copies"] == 1
        assert numbers["seconds"] > 0
        ac.println("x", comm=comm)
        assert comm.stats()["println"]["calls"] == 1

    on_ranks(size, check)
