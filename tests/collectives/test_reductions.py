from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._dtypes import BY_NAME
from arraycomm._reduce import selection
from tests.support import internals
from tests.support.on_ranks import each_rank_of
from tests.support.oracle import OPS, expected, family, same_bits, same_result, sample

# One element, what travels in the header of a node, and what goes through a segment or in slices.
COUNTS = [1, 37, 30_000]


@pytest.fixture(params=["segment", "slices"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How reductions go that do not fit in the header, where memory is shared."""
    if request.param == "slices":
        monkeypatch.setattr(selection, "is_preferred", lambda *_: False)
    way: str = request.param
    return way


# A family each, and bfloat16; the laws draw the others.
@pytest.mark.parametrize("name", ["bool", "int8", "float32", "bfloat16", "complex128"])
@each_rank_of("few")
def test_allreduce_is_the_fold_in_rank_order(comm: Communicator, few, way, name) -> None:
    dtype = BY_NAME[name].dtype
    for op, count in product(OPS[family(dtype)], COUNTS):
        arrays = [sample(dtype, count, rank, op) for rank in range(comm.size)]
        result = comm.allreduce(arrays[comm.rank], op)
        few, last = slice(0, 200), slice(count - min(count, 100), count)
        for part in (few, last):
            want = expected([array[part] for array in arrays], op)
            assert same_result(result[part], want, op), (op, count)
        assert same_bits(comm.allreduce(arrays[comm.rank], op), result), (op, "called again")


@pytest.mark.parametrize("name", ["int64", "bfloat16"])
@each_rank_of("few")
def test_reduce_gives_root_what_allreduce_gives_all(comm: Communicator, way, name) -> None:
    dtype = BY_NAME[name].dtype
    for op, count in product(OPS[family(dtype)], (5, 40_000)):
        mine = sample(dtype, count, comm.rank, op)
        before = mine.tobytes()
        whole = comm.allreduce(mine, op)
        for root in range(comm.size):
            result = comm.reduce(mine, op, root)
            if comm.rank == root:
                assert same_bits(result, whole), op
            else:
                assert result is None
        assert mine.tobytes() == before


@each_rank_of("few", "torch")
def test_subnormal_numbers_are_kept_in_threads_that_flush_them(comm: Communicator, torch) -> None:
    x = np.full(5, 1e-310)
    torch.set_flush_denormal(True)
    try:
        results = [comm.allreduce(x), comm.allreduce(x), comm.allreduce(np.full(9_000, 1e-310))]
    finally:
        torch.set_flush_denormal(False)
    for result in results:
        assert (result == expected([np.full(1, 1e-310)] * comm.size, "sum")[0]).all()
        assert (result != 0).all()


@each_rank_of(3)
def test_overflow_is_silent_and_infinite(comm: Communicator) -> None:
    for dtype in (np.float32, np.float16):
        for count in (1, 20_000):
            x = np.full(count, np.finfo(dtype).max, dtype)
            for _ in range(2):
                assert np.isposinf(comm.allreduce(x).astype(np.float64)).all()


@each_rank_of("few")
def test_large_arrays_like_those_before_may_lie_otherwise(comm: Communicator) -> None:
    """With gaps from the same place on, and with an `out` that overlaps them."""
    count = 40_000
    memory, out = np.empty(2 * count), np.empty(count)
    x, strided, shifted = memory[:count], memory[::2], memory[1 : count + 1]
    values = np.arange(float(count))
    for source, into in ((x, out), (x, out), (x, out), (strided, out), (x, shifted), (x, x)):
        source[...] = values + comm.rank
        comm.allreduce(source, out=into)
        assert (into == comm.size * values + sum(range(comm.size))).all()


@pytest.mark.parametrize("odd", ["shape", "dtype", "op"])
@each_rank_of(3)
def test_one_rank_that_differs_after_large_calls_raises_on_all(comm: Communicator, odd) -> None:
    x, out = np.ones((2, 40_000), np.float32)
    with comm.dup(timeout=20) as other:
        for _ in range(4):
            other.allreduce(x, out=out)
        if comm.rank == comm.size - 1:
            x = {"shape": x[1:], "dtype": x.astype(np.int32)}.get(odd, x)
        op = "max" if odd == "op" and comm.rank == comm.size - 1 else "sum"
        with pytest.raises(ac.MismatchError, match=f"rank {comm.size - 1}: allreduce"):
            other.allreduce(x, op)


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
