from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arraycomm._collectives import scans
from arraycomm._reduce import algorithms
from arraycomm._reduce.chunks import overlapping_chunk, scratch_bytes
from tests.support.on_ranks import alone

# Nothing in it depends on what else runs.
pytestmark = alone


@given(st.integers(1, 1 << 40), st.integers(2, 1 << 20))
def test_chunks_that_overlap_are_about_equally_long(nbytes, size) -> None:
    chunk = overlapping_chunk(nbytes, size)
    assert chunk % 64 == 0
    assert chunk <= 256 << 20
    count = -(-nbytes // chunk)
    # Whole elements of any length: no chunk has only what was left.
    assert count == -(-nbytes // (chunk // 16 * 16))
    assert count * chunk - nbytes <= 64 * count
    more = overlapping_chunk(nbytes, 4 * size)
    assert -(-nbytes // more) <= count


@example(size=20, count=1 << 22, itemsize=16)
# The smallest chunks of the largest array between the most ranks have millions of slices.
@settings(deadline=None)
@given(
    size=st.integers(2, 4096),
    count=st.integers(1, 1 << 22),
    itemsize=st.sampled_from((1, 2, 4, 8, 16)),
)
def test_scratch_memory_is_taken_beforehand(size, count, itemsize) -> None:
    """Of the rank whose slices are the longest, and whose `take` would fail after the header otherwise."""
    taken, loaded = list[int](), list[str]()

    class TakenError(Exception):
        pass

    def take(count, dtype):
        taken.append(count * dtype.itemsize)
        raise TakenError

    link: Any = SimpleNamespace(
        rank=size - 1, size=size, overlaps=True, take=take, slot=(-1, False)
    )
    link.reduces, link.chunk_bytes = lambda *_: False, 0
    link.load = lambda op, _: loaded.append(op)
    array = np.broadcast_to(np.zeros(1, f"V{itemsize}"), count)
    bounds = [count * r // size for r in range(size + 1)]
    part = array[bounds[-2] :]
    for moves, nbytes in (
        (algorithms.allreduce(link, array, array, "sum"), array.nbytes),
        (algorithms.reduce_scatter(link, array, bounds, part, "sum"), 0),
        (scans.prefixes(link, array, array, "sum", True), 0),
    ):
        with pytest.raises(TakenError):
            next(moves)
        assert taken.pop() <= scratch_bytes(link, nbytes)
        assert loaded.pop() == "sum"
