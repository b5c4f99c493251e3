"""Reductions of which each rank gets another part: scan, exscan and reduce_scatter, by bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._dtypes import BY_NAME
from arraycomm._reduce import blocks, selection
from tests.support import internals
from tests.support.on_ranks import each_rank_of
from tests.support.oracle import expected, same_bits, same_result, sample

Array = np.ndarray[Any, Any]

PARTS = ["scan", "exscan", "reduce_scatter"]
WITH_ALLREDUCE = ["allreduce", *PARTS]


def want(name: str, arrays: Sequence[Array], rank: int, op: str) -> Array | None:
    """Return what `rank` must get where rank r passes `arrays[r]`."""
    match name:
        case "allreduce":
            return expected(arrays, op)
        case "scan":
            return expected(arrays[: rank + 1], op)
        case "exscan":
            return expected(arrays[:rank], op) if rank else None
        case _:
            return expected([array[rank] for array in arrays], op)


def same(got: Any, right: Array | None, op: str) -> bool:
    """Return whether results are equal by bits, but for the zero that min or max chose."""
    if got is None or right is None:
        return got is None and right is None
    return same_result(got, right, op)


def inputs(dtype: Any, size: int, count: int, op: str = "sum") -> list[Array]:
    """Return an array for each rank, with one row for each rank."""
    return _inputs(np.dtype(dtype), size, count, "prod" if op == "prod" else "sum")


@lru_cache(maxsize=64)
def _inputs(dtype: np.dtype[Any], size: int, count: int, op: str) -> list[Array]:
    arrays = [sample(dtype, size * count, rank, op) for rank in range(size)]
    for array in arrays:
        array.flags.writeable = False
    return [array.reshape(size, count) for array in arrays]


@pytest.fixture(params=PARTS)
def name(request: pytest.FixtureRequest) -> str:
    """One of the three."""
    name: str = request.param
    return name


@each_rank_of("few")
def test_more_bytes_than_one_movement_takes(comm: Communicator, name, monkeypatch) -> None:
    limit = 4096
    monkeypatch.setattr(blocks, "MAX_BYTES", limit)
    monkeypatch.setattr(selection, "CHUNK_BYTES", 3_000)
    largest = internals.spans(comm)
    narrow = BY_NAME["bfloat16"].dtype
    for dtype, op in (("f8", "mean"), ("c16", "prod"), (narrow, "sum"), ("?", "xor")):
        arrays = inputs(dtype, comm.size, 5_001, op)
        for each in (comm, comm.dup(check=False)):
            got = getattr(each, name)(arrays[comm.rank], op)
            assert same(got, want(name, arrays, comm.rank, op), op), (dtype, op)
    assert max(largest, default=0) <= limit


@pytest.mark.parametrize("limit", [4096, 2**31])
@each_rank_of("several")
def test_shares_of_reduce_scatter_in_many_chunks(comm: Communicator, limit, monkeypatch) -> None:
    monkeypatch.setattr(blocks, "MAX_BYTES", limit)
    monkeypatch.setattr(selection, "CHUNK_BYTES", 3_000)
    counts = [(0, 9_001, 77)[rank % 3] for rank in range(comm.size)]
    arrays = [sample(np.dtype("f8"), sum(counts), rank, "sum") for rank in range(comm.size)]
    got = comm.reduce_scatter(arrays[comm.rank], "mean", counts=counts)
    start = sum(counts[: comm.rank])
    assert same_bits(got, expected(arrays, "mean")[start : start + counts[comm.rank]])


@each_rank_of(3, "torch")
def test_subnormal_numbers_are_kept_in_threads_that_flush_them(comm: Communicator, torch) -> None:
    # The second of the small ones takes the fast path.
    for name, count in product(WITH_ALLREDUCE, (3, 3, 9_000)):
        x = np.full((comm.size, count), 1e-310)
        torch.set_flush_denormal(True)
        try:
            got = getattr(comm, name)(x)
        finally:
            torch.set_flush_denormal(False)
        assert same(got, want(name, [x] * comm.size, comm.rank, "sum"), "sum")
        assert got is None or (got != 0).all()


@each_rank_of(3)
def test_exscan_looks_at_out_where_there_is_a_result(comm: Communicator) -> None:
    for culprit in range(1, comm.size):
        out = np.ones(5) if comm.rank in (0, culprit) else None
        with pytest.raises(ValueError if comm.rank == culprit else ac.PeerError):
            comm.exscan(np.ones(3), out=out)
    assert comm.exscan(1) == (comm.rank or None)
