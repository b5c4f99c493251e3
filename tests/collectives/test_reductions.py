from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._dtypes import BY_NAME
from arraycomm._folds import exact
from tests.support import internals
from tests.support.on_ranks import each_rank_of
from tests.support.oracle import same_bits, sample


@pytest.fixture
def _slots_of_users() -> Iterator[None]:
    small = internals.slots()
    internals.set_slots(*internals.SLOTS)
    yield
    internals.set_slots(*small)


@pytest.mark.usefixtures("_slots_of_users")
@each_rank_of("several")
def test_as_much_as_users_have_room_for_travels_with_the_header(comm: Communicator) -> None:
    """And one element more does not; the bits are those of arrays in pieces, which go another way."""
    other = comm.dup()
    room = internals.control(other).payload
    if internals.control(other).shared:
        assert room == (1 << 20 if other.size <= 3 else 699_048)
    for dtype, more in product((np.dtype("float32"), BY_NAME["bfloat16"].dtype), (0, 1)):
        mine = sample(dtype, room // dtype.itemsize + more, other.rank)
        assert (ac.explain(mine, comm=other).algorithm == "header") == (not more)
        whole = other.allreduce(mine)
        parts = [other.allreduce(part) for part in np.array_split(mine, 7)]
        assert same_bits(whole, np.concatenate(parts))
        assert same_bits(other.plan([mine], "sum")([mine])[0], whole)
        rows = other.allgather(mine)
        assert all(same_bits(other.bcast(mine, root), rows[root]) for root in range(comm.size))


def test_no_columns_have_no_words() -> None:
    exact.add_rows(np.dtype(np.float64), np.ones((3, 0)), np.empty(0, exact.WORD))


@each_rank_of(3, "torch")
def test_subnormal_numbers_are_kept_in_threads_that_flush_them(comm: Communicator, torch) -> None:
    # The second of the small ones takes the fast path.
    for name, count in product(("allreduce", "scan", "exscan", "reduce_scatter"), (3, 3, 9_000)):
        x = np.full((comm.size, count), 1e-310)
        torch.set_flush_denormal(True)
        try:
            got = getattr(comm, name)(x)
        finally:
            torch.set_flush_denormal(False)
        added = {"scan": comm.rank + 1, "exscan": comm.rank}.get(name, comm.size)
        assert got is None if added == 0 else (got == added * 1e-310).all()


@each_rank_of(3)
def test_exscan_looks_at_out_where_there_is_a_result(comm: Communicator) -> None:
    for culprit in range(1, comm.size):
        out = np.ones(5) if comm.rank in (0, culprit) else None
        with pytest.raises(ValueError if comm.rank == culprit else ac.PeerError):
            comm.exscan(np.ones(3), out=out)
    assert comm.exscan(1) == (comm.rank or None)
