"""Any strides, any framework, any memory: what counts is the logical array in C order."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from tests.support.frameworks import converter
from tests.support.layouts import LAYOUTS, OUTS
from tests.support.on_ranks import SIZES
from tests.support.oracle import DTYPES, expected, same_bits, sample
from tests.support.pairwise import pairwise

Array = np.ndarray[Any, Any]

SHAPES = [(3, 4), (40, 60), (300, 100)]


def _values(shape: tuple[int, ...], rank: int, dtype: Any = np.float32) -> Array:
    return sample(np.dtype(dtype), int(np.prod(shape)), rank).reshape(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_what_a_contiguous_array_gives(on_ranks, size, layout, shape) -> None:
    def check(comm: Communicator) -> None:
        arrays = [_values(shape, rank) for rank in range(comm.size)]
        mine = LAYOUTS[layout](arrays[comm.rank])
        before = mine.tobytes()
        want = comm.allreduce(arrays[comm.rank])
        for _ in range(2):
            got = comm.allreduce(mine)
            assert same_bits(got, want)
            assert got.flags.c_contiguous
        assert same_bits(comm.allgather(mine), np.stack(arrays))
        assert same_bits(comm.bcast(mine, comm.size - 1), arrays[-1])
        reduced = comm.reduce(mine, root=0)
        assert reduced is None or same_bits(reduced, want)
        assert mine.tobytes() == before

    on_ranks(size, check)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layouts_may_differ_between_ranks(on_ranks, several, shape) -> None:
    def check(comm: Communicator) -> None:
        arrays = [_values(shape, rank) for rank in range(comm.size)]
        layout = list(LAYOUTS.values())[comm.rank % len(LAYOUTS)]
        want = comm.allreduce(arrays[comm.rank])
        assert same_bits(comm.allreduce(layout(arrays[comm.rank])), want)
        assert same_bits(comm.allgather(layout(arrays[comm.rank])), np.stack(arrays))

    on_ranks(several, check)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1)], ids=str)
def test_scalars_and_empty_arrays(on_ranks, size, shape) -> None:
    def check(comm: Communicator) -> None:
        arrays = [np.full(shape, rank + 1.0) for rank in range(comm.size)]
        for _ in range(2):
            assert same_bits(comm.allreduce(arrays[comm.rank]), np.asarray(sum(arrays)))
        assert same_bits(comm.allgather(arrays[comm.rank]), np.stack(arrays))
        for root in range(comm.size):
            got = comm.bcast(arrays[root] if comm.rank == root else None, root)
            assert same_bits(got, arrays[root])
            reduced = comm.reduce(arrays[comm.rank], root=root)
            assert reduced is None or same_bits(reduced, np.asarray(sum(arrays)))

    on_ranks(size, check)


def test_broadcast_views_are_sent_as_what_they_show(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
        mine = np.broadcast_to(np.float32(comm.rank + 1), (50, 70))
        assert (comm.allreduce(mine) == sum(range(comm.size + 1))).all()

    on_ranks(size, check)


def test_arrays_of_many_dimensions(on_ranks, size) -> None:
    shape = (1, 2) * 6

    def check(comm: Communicator) -> None:
        arrays = [_values(shape, rank) for rank in range(comm.size)]
        assert same_bits(comm.allreduce(arrays[comm.rank]), expected(arrays, "sum"))
        root = comm.size - 1
        got = comm.bcast(arrays[root] if comm.rank == root else None, root)
        assert same_bits(got, arrays[root])
        assert same_bits(comm.allgather(arrays[comm.rank]), np.stack(arrays))

    on_ranks(size, check)


MOVED = [
    np.array([(1, 2.5), (3, 4.5)], [("a", "i4"), ("b", "f8")]),
    np.array(["2026-01-01", "NaT"], "datetime64[D]"),
    np.array([3, 4], "timedelta64[ms]"),
    np.array([b"ab", b"c"]),
    np.array(["ä", "bcd"]),
    np.arange(2, dtype=">f8"),
]


@pytest.mark.parametrize("array", MOVED, ids=lambda a: a.dtype.str)
def test_dtypes_without_arithmetic_are_moved(on_ranks, size, array) -> None:
    def check(comm: Communicator) -> None:
        native = array.astype(array.dtype.newbyteorder("="))
        root = comm.size - 1
        for repeat in (1, 5_000):
            mine = np.tile(array, repeat)
            got = comm.bcast(mine if comm.rank == root else None, root)
            assert got.dtype == native.dtype
            assert got.tobytes() == np.tile(native, repeat).tobytes()
            gathered = comm.allgather(mine)
            assert gathered.shape == (comm.size, *mine.shape)
            assert gathered.tobytes() == got.tobytes() * comm.size

    on_ranks(size, check)


@pytest.mark.parametrize("array", MOVED, ids=lambda a: a.dtype.str)
def test_moved_dtypes_come_right_call_after_call(on_ranks, array) -> None:
    """The description takes steps of its own, which must not overwrite what is still to be read."""

    def check(comm: Communicator) -> None:
        for number in range(100):
            mine = np.roll(array, number)
            got = comm.bcast(mine if comm.rank == 0 else None, 0)
            assert got.tobytes() == mine.astype(got.dtype).tobytes()

    on_ranks(3, check)


def test_dtype_that_cannot_be_described_is_refused_before_it_is_sent(on_ranks, size) -> None:
    dtype = np.dtype([("a", ml_dtypes.bfloat16)])

    def check(comm: Communicator) -> None:
        with pytest.raises(TypeError if comm.rank == 0 else ac.PeerError):
            comm.bcast(np.zeros(2, dtype) if comm.rank == 0 else None, 0)
        assert comm.allreduce(1) == comm.size

    on_ranks(size, check)


def test_byte_orders_may_differ(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
        got = comm.allreduce(np.arange(5).astype("<i4" if comm.rank % 2 else ">i4"))
        assert got.tolist() == [n * comm.size for n in range(5)]
        assert got.dtype.isnative

    on_ranks(size, check)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", OUTS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=str)
def test_out_of_any_layout(on_ranks, size, kind, shape, dtype) -> None:
    def check(comm: Communicator) -> None:
        mine = _values(shape, comm.rank, dtype)
        want = comm.allreduce(mine)
        for _ in range(2):
            out = OUTS[kind](want)
            assert comm.allreduce(mine, out=out) is out
            assert same_bits(out.copy(), want)
        out = OUTS[kind](want)
        assert comm.bcast(mine, 0, out=out) is out
        assert same_bits(out.copy(), comm.bcast(mine, 0))

    on_ranks(size, check)


@pytest.mark.parametrize("count", [10, 30_000])
def test_out_may_be_the_input_or_overlap_it(on_ranks, size, count) -> None:
    def check(comm: Communicator) -> None:
        memory = _values((count + 7,), comm.rank)
        want = comm.allreduce(memory[:count].copy())
        for start in (0, 1, 7):
            both = memory.copy()
            x, out = both[:count], both[start : start + count]
            for _ in range(2):
                both[...] = memory
                assert comm.allreduce(x, out=out) is out
                assert same_bits(out.copy(), want)

    on_ranks(size, check)


def test_results_share_memory_with_nobody(on_ranks, size) -> None:
    """Writing to anything that a call was given or gave changes no other result."""

    def check(comm: Communicator) -> None:
        for count in (3, 5_000, 40_000):
            x = np.full(count, 1.0)
            results = [f(x) for f in (comm.allreduce, comm.allgather, comm.bcast) for _ in "ab"]
            copies = [result.copy() for result in results]
            x[...] = 99
            for number, result in enumerate(results):
                assert not np.shares_memory(result, x)
                for other, copy in zip(results, copies, strict=True):
                    assert other is result or not np.shares_memory(result, other)
                    assert np.array_equal(other, copy)
                result[...] = -1 - number
                copies[number][...] = -1 - number
            fresh = comm.allreduce(np.full(count, 2.0))
            assert (fresh == 2.0 * comm.size).all()

    on_ranks(size, check)


def test_results_are_aligned_for_the_frameworks(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
        for count in (1, 17, 3_000, 50_000):
            for result in (comm.allreduce(np.ones(count)), comm.allgather(np.ones(count))):
                assert result.ctypes.data % 64 == 0

    on_ranks(size, check)


FRAMEWORKS = ["numpy", "torch", "jax"]


# JAX has them only if it is told to.
_WIDE = ("int64", "uint64", "float64", "complex128")


@pytest.mark.parametrize(
    ("size", "name", "dtype"),
    pairwise(
        (size, name, dtype)
        for size, name, dtype in product(SIZES, FRAMEWORKS, DTYPES)
        if name != "jax" or dtype.name not in _WIDE
    ),
    ids=str,
)
def test_each_framework_gets_its_own_back(on_ranks, size, name, dtype) -> None:
    make = converter(name)
    op = "xor" if dtype.kind == "b" else "sum"

    def check(comm: Communicator) -> None:
        for count in (6, 20_000):
            arrays = [sample(dtype, count, rank) for rank in range(comm.size)]
            want = comm.allreduce(arrays[comm.rank], op)
            mine = make(arrays[comm.rank])
            for _ in range(2):
                got = comm.allreduce(mine, op)
                assert type(got) is type(mine)
                assert same_bits(np.asarray(ac.exchange(got, "numpy")), want)
            got = comm.bcast(None if comm.rank else mine, 0, like=mine)
            assert type(got) is type(mine)
            assert same_bits(np.asarray(ac.exchange(got, "numpy")), arrays[0])

    on_ranks(size, check)


def test_frameworks_may_differ_between_ranks(on_ranks, several) -> None:
    makes = [converter(name) for name in FRAMEWORKS]

    def check(comm: Communicator) -> None:
        for dtype in (np.float32, ml_dtypes.bfloat16, np.int32):
            for count in (5, 30_000):
                arrays = [sample(np.dtype(dtype), count, rank) for rank in range(comm.size)]
                mine = makes[comm.rank % 3](arrays[comm.rank])
                got = comm.allreduce(mine)
                assert type(got) is type(mine)
                got = np.asarray(ac.exchange(got, "numpy"))
                assert same_bits(got[:100], expected([a[:100] for a in arrays], "sum"))

    on_ranks(several, check)


def test_torch_out_is_written_and_its_version_counted(on_ranks, size) -> None:
    torch = pytest.importorskip("torch")

    def check(comm: Communicator) -> None:
        for count in (4, 20_000):
            x, out = torch.full((count,), 2.0), torch.zeros(count)
            for _ in range(2):
                version = out._version
                assert comm.allreduce(x, out=out) is out
                assert (out == 2.0 * comm.size).all()
                assert out._version > version

    on_ranks(size, check)
