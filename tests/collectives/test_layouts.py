"""What laws seldom draw of layouts and dtypes; that those of NumPy's and of frameworks do not matter is one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from tests.support.on_ranks import each_rank_of

MOVED = [
    np.array([(1, 2.5), (3, 4.5)], [("a", "i4"), ("b", "f8")]),
    np.array(["2026-01-01", "NaT"], "datetime64[D]"),
    np.array([3, 4], "timedelta64[ms]"),
    np.array([b"ab", b"c"]),
    np.array(["ä", "bcd"]),
    np.arange(2, dtype=">f8"),
]


@each_rank_of(3)
def test_moved_dtypes_come_right_call_after_call(comm: Communicator) -> None:
    """The description takes steps of its own, which must not overwrite what is still to be read."""
    for number in range(60):
        mine = np.roll(MOVED[number % 7 % len(MOVED)], number)
        got = comm.bcast(mine if comm.rank == 0 else None, 0)
        assert got.tobytes() == mine.astype(got.dtype).tobytes()


@each_rank_of("few")
def test_dtype_that_cannot_be_described_is_refused_before_it_is_sent(comm: Communicator) -> None:
    dtype = np.dtype([("a", ml_dtypes.bfloat16)])
    with pytest.raises(TypeError if comm.rank == 0 else ac.PeerError):
        comm.bcast(np.zeros(2, dtype) if comm.rank == 0 else None, 0)
    assert comm.allreduce(1) == comm.size


@each_rank_of("few")
def test_results_are_aligned_for_the_frameworks(comm: Communicator) -> None:
    for count in (1, 17, 3_000, 50_000):
        for result in (comm.allreduce(np.ones(count)), comm.allgather(np.ones(count))):
            assert result.ctypes.data % 64 == 0


@each_rank_of(3, "jax", "torch")
def test_jax_array_is_not_changed_through_what_came_of_it(comm: Communicator, jax, torch) -> None:
    """As by torch.from_dlpack(jax_array), and a write."""
    for count in (3, 20_000):
        x = jax.numpy.ones(count)
        for got in (ac.exchange(x, "torch"), comm.scan(ac.exchange(x, torch.ones(1)))):
            got.fill_(7)
        with pytest.raises(BufferError, match="immutable"):
            comm.alltoallv(np.ones(1, np.float32), [1] + [0] * (comm.size - 1), out=x)
        assert (np.asarray(x) == 1).all()
