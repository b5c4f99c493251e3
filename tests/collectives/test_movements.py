"""The collectives that move arrays: what each rank gets is what NumPy makes of all ranks' arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._reduce import blocks
from tests.support import internals
from tests.support.on_ranks import each_rank_of

Array = np.ndarray[Any, Any]

EVEN = ["allgather", "gather", "scatter", "alltoall"]
UNEVEN = ["allgatherv", "gatherv", "scatterv", "alltoallv"]
MOVEMENTS = [*EVEN, *UNEVEN]


def expected(
    name: str, arrays: Sequence[Array], counts: Sequence[Sequence[int]], rank: int, root: int
) -> Array | None:
    """Return what `rank` must get where rank r passes `arrays[r]`, and `counts[r]` if at all."""
    if name in ("gather", "gatherv") and rank != root:
        return None
    match name:
        case "allgather" | "gather":
            return np.stack(arrays)
        case "allgatherv" | "gatherv":
            return np.concatenate(arrays)
        case "scatter":
            return arrays[root][rank, ...]
        case "scatterv":
            return _parts(arrays[root], counts[root])[rank]
        case "alltoall":
            return np.stack([array[rank] for array in arrays])
        case _:
            parts = [_parts(a, c)[rank] for a, c in zip(arrays, counts, strict=True)]
            return np.concatenate(parts)


def _parts(array: Array, counts: Sequence[int]) -> list[Array]:
    return np.split(array, np.cumsum(counts)[:-1])


def call(
    comm: Communicator,
    name: str,
    x: Any,
    counts: Sequence[int] | None = None,
    root: int = 0,
    **keywords: Any,
) -> Any:
    """Call a movement with those of the arguments that it has on this rank."""
    method = getattr(comm, name)
    match name:
        case "allgather" | "allgatherv" | "alltoall":
            return method(x, **keywords)
        case "alltoallv":
            return method(x, counts, **keywords)
        case "gather" | "gatherv":
            return method(x, root, **keywords)
    if comm.rank != root:
        return method(None, root=root, **keywords)
    return method(x, root, **keywords) if name == "scatter" else method(x, counts, root, **keywords)


def values(dtype: Any, count: int, rank: int) -> Array:
    """Elements that tell ranks and places apart, of any dtype."""
    return _values(np.dtype(dtype), count, rank).copy()


@lru_cache(maxsize=64)
def _values(dtype: np.dtype[Any], count: int, rank: int) -> Array:
    numbers = np.arange(count) * 7 + rank * 3 + 1
    if dtype.kind in "SU":
        return numbers.astype("U4").astype(dtype)
    if dtype.kind == "V" and dtype.names:
        raw = (numbers[:, None] + np.arange(dtype.itemsize) * 5).astype(np.uint8)
        return raw.reshape(-1).view(dtype)
    return (numbers % 2 if dtype.kind == "b" else numbers % 120).astype(dtype)


def inputs(
    name: str, size: int, length: int, row: tuple[int, ...] = (2,), dtype: Any = np.int32
) -> tuple[list[Array], list[list[int]]]:
    """Return what each rank passes: arrays, and counts of up to `length` with zeros among them."""
    if name in EVEN:
        counts = [[1] * size for _ in range(size)]
        shapes = [(size, length, *row)] * size
    else:
        counts = [
            [(r * 3 + k * 5 + length) % (length + 1) for k in range(size)] for r in range(size)
        ]
        shapes = [(sum(c), *row) for c in counts]
    arrays = [values(dtype, int(np.prod(s)), r).reshape(s) for r, s in enumerate(shapes)]
    return arrays, counts


def same(got: Any, want: Array | None) -> bool:
    """Return whether results are equal byte for byte, with dtype and shape."""
    if got is None or want is None:
        return got is None and want is None
    native = want.astype(want.dtype.newbyteorder("="))
    assert (got.dtype, got.shape) == (native.dtype, native.shape)
    if native.dtype.names:
        # Field by field, for what stands between fields is no value.
        return all(same(got[field], native[field]) for field in native.dtype.names)
    return bool(got.tobytes() == native.tobytes())


@pytest.fixture(params=MOVEMENTS)
def name(request: pytest.FixtureRequest) -> str:
    """One of the movements."""
    name: str = request.param
    return name


@each_rank_of(3)
def test_sizes_around_what_travels_with_the_header(comm: Communicator, name) -> None:
    """With one byte a row, each total from a byte too few to a byte too many."""
    table = 8 * comm.size
    for payload, more in product((128, 32 << 10), (-table - 1, -table, 1 - table, 1)):
        nbytes = payload + more
        length = nbytes // comm.size
        arrays, counts = inputs(name, comm.size, length, (), np.uint8)
        if name in UNEVEN:
            counts = [[nbytes - length * (comm.size - 1), *[length] * (comm.size - 1)]] * comm.size
            arrays = [values(np.uint8, nbytes, r) for r in range(comm.size)]
        got = call(comm, name, arrays[comm.rank], counts[comm.rank])
        assert same(got, expected(name, arrays, counts, comm.rank, 0)), nbytes


OPAQUE = [
    np.dtype([("a", "i4"), ("b", "f8"), ("c", "S3")]),
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
    np.dtype("datetime64[ns]"),
    np.dtype("timedelta64[D]"),
    np.dtype("S5"),
    np.dtype("U4"),
    np.dtype([("a", ">i4"), ("b", ">M8[s]")]),
    np.dtype(">f8"),
    np.dtype(">i2"),
    np.dtype(">c16"),
]


@pytest.mark.parametrize("dtype", [np.dtype(ml_dtypes.bfloat16), *OPAQUE], ids=str)
@each_rank_of(3)
def test_dtypes_of_each_sort_are_moved(comm: Communicator, dtype) -> None:
    for name in MOVEMENTS:
        for length in (2, 9_000):
            arrays, counts = inputs(name, comm.size, length, (1,), dtype)
            got = call(comm, name, arrays[comm.rank], counts[comm.rank], 1)
            assert same(got, expected(name, arrays, counts, comm.rank, 1)), (name, length)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, OPAQUE[0]], ids=str)
@each_rank_of(3)
def test_arrays_of_more_than_eight_dimensions_are_moved(comm: Communicator, dtype) -> None:
    for name, length in product(MOVEMENTS, (1, 200)):
        arrays, counts = inputs(name, comm.size, length, (1, 2) * 5, dtype)
        got = call(comm, name, arrays[comm.rank], counts[comm.rank], 2)
        assert same(got, expected(name, arrays, counts, comm.rank, 2)), (name, length)
    x = values(dtype, 64, 0).reshape((1, 2) * 6)
    assert same(comm.bcast(None if comm.rank else x, 0), x)


@each_rank_of("few")
def test_fields_that_overlap_are_refused_where_the_others_cannot_know_them(
    comm: Communicator,
) -> None:
    dtype = np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 0]})
    x = np.zeros((comm.size, 2), dtype)
    for name in ("bcast", "scatter"):
        with pytest.raises(ac.PeerError if comm.rank else TypeError, match=name):
            getattr(comm, name)(None if comm.rank else x)
    assert comm.alltoall(x).dtype == dtype


# Counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [tuple, np.array, iter, lambda c: np.array(c, np.uint8)])
@each_rank_of("few")
def test_counts_may_be_any_sequence_of_integers(comm: Communicator, kind) -> None:
    for name in ("scatterv", "alltoallv"):
        arrays, counts = inputs(name, comm.size, 3)
        got = call(comm, name, arrays[comm.rank], kind(counts[comm.rank]))
        assert same(got, expected(name, arrays, counts, comm.rank, 0))
    _, received = comm.alltoallv(arrays[comm.rank], counts[comm.rank], return_counts=True)
    assert received == [c[comm.rank] for c in counts]
    assert {type(count) for count in received} == {int}


@each_rank_of(3)
def test_more_counts_than_travel_with_the_header(comm: Communicator) -> None:
    # As on many ranks between nodes: not even one count for each fits.
    internals.set_inline_bytes(comm, 8)
    for name, length in product(("scatterv", "alltoallv"), (0, 1, 3, 9_000)):
        arrays, counts = inputs(name, comm.size, length)
        got = call(comm, name, arrays[comm.rank], counts[comm.rank], 2)
        assert same(got, expected(name, arrays, counts, comm.rank, 2)), (name, length)


@each_rank_of(2)
def test_rank_alone_gathers_into_the_memory_of_its_own_array(comm: Communicator) -> None:
    # More than travels with the header.
    expected = np.arange(300_000.0)
    with comm.split(comm.rank) as alone:
        for gather in (alone.gather, alone.allgather):
            x = expected.copy()
            assert same(gather(x, out=x[None]), expected[None])
        for gather in (alone.gatherv, alone.allgatherv):
            x = expected.copy()
            assert same(gather(x, out=x), expected)


@each_rank_of(3)
def test_what_the_other_ranks_pass_to_scatter_is_ignored(comm: Communicator) -> None:
    x = np.arange(comm.size * 2.0).reshape(comm.size, 2)
    counts = [2, *[0] * (comm.size - 2), comm.size - 2]
    mine = (x, counts) if comm.rank == 0 else ("no array", "no counts")
    assert comm.scatter(mine[0]).tolist() == x[comm.rank].tolist()
    assert len(comm.scatterv(*mine)) == counts[comm.rank]


# Large data -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [16, 1000])
@each_rank_of(3)
def test_more_bytes_than_one_movement_takes_go_in_pieces(
    comm: Communicator, name, limit, monkeypatch
) -> None:
    monkeypatch.setattr(blocks, "MAX_BYTES", limit)
    # So that little data is more than travels with the header.
    internals.set_inline_bytes(comm, 128)
    largest, root = internals.spans(comm), comm.size - 1
    for length in (limit // 8 // comm.size, limit // 8, limit // 8 + 1, limit // 2):
        arrays, counts = inputs(name, comm.size, max(length, 20))
        got = call(comm, name, arrays[comm.rank], counts[comm.rank], root)
        assert same(got, expected(name, arrays, counts, comm.rank, root)), length
    assert 0 < max(largest) <= limit


@each_rank_of("few")
def test_bcast_and_objects_of_more_bytes_than_one_movement_takes(
    comm: Communicator, monkeypatch
) -> None:
    monkeypatch.setattr(blocks, "MAX_BYTES", 1000)
    for root in range(comm.size):
        x = values(np.int64, 9_001, root)
        assert same(comm.bcast(x if comm.rank == root else None, root), x)
        texts = ["é" * (20_000 + 1_000 * r) for r in range(comm.size)]
        assert comm.allgather_object(texts[comm.rank]) == texts
        gathered = comm.gather_object(texts[comm.rank], root)
        assert gathered == (texts if comm.rank == root else None)


# Results --------------------------------------------------------------------------------------


@each_rank_of(1)
def test_on_one_rank_input_and_output_may_be_one_memory(comm: Communicator) -> None:
    for name, length in product(MOVEMENTS, (2, 9_000)):
        x = values(np.int32, length, 0)[None]
        want = x.copy()
        source = x[0] if name in ("allgather", "gather") else x
        out = x[0] if name == "scatter" else x
        assert call(comm, name, source, [1], out=out) is out
        assert same(x, want), (name, length)


# Frameworks -----------------------------------------------------------------------------------


@each_rank_of(3, "torch")
def test_scattered_parts_are_of_numpy_where_nothing_else_is_wanted(
    comm: Communicator, torch
) -> None:
    x = torch.ones(comm.size, 2) if comm.rank == 0 else None
    for got in (comm.scatter(x), comm.scatterv(x, [1] * comm.size)):
        assert type(got) is (np.ndarray if comm.rank else torch.Tensor)
    got = comm.scatter(np.arange(comm.size) + 0.5 if comm.rank == 0 else None, like=1.0)
    assert got == comm.rank + 0.5
    assert comm.rank == 0 or type(got) is float


@each_rank_of(3, "torch")
def test_torch_out_is_written_and_its_version_counted(comm: Communicator, torch) -> None:
    for name, length in product(MOVEMENTS, (3, 9_000)):
        arrays, counts = inputs(name, comm.size, length, (2,), np.float32)
        want = expected(name, arrays, counts, comm.rank, 0)
        out = None if want is None else torch.zeros(want.shape)
        version = 0 if out is None else out._version
        got = call(comm, name, arrays[comm.rank], counts[comm.rank], out=out)
        assert got is out
        assert out is None or (same(out.numpy(), want) and out._version > version), name


@each_rank_of("few")
def test_statistics_count_the_bytes_that_were_passed(comm: Communicator) -> None:
    for name in MOVEMENTS:
        arrays, counts = inputs(name, comm.size, 9)
        for _ in range(2):
            call(comm, name, arrays[comm.rank], counts[comm.rank])
        passed = arrays[comm.rank].nbytes if "scatter" not in name or comm.rank == 0 else 0
        numbers = comm.stats()[name]
        assert (numbers["calls"], numbers["bytes"]) == (2, 2 * passed), name
