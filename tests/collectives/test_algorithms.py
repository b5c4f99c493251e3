from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arraycomm._collectives import algorithms, scans
from arraycomm._collectives.chunks import overlapping_chunk, scratch_bytes
from arraycomm._collectives.selection import GATHER_BYTES, MAX_STEPS, choose, most_in_steps
from arraycomm._transports.crossovers import Crossovers

SLOT = 32 << 10


@pytest.mark.parametrize(
    ("nbytes", "size", "shared", "chosen"),
    [
        (1 << 30, 1, True, "local"),
        (0, 1, False, "local"),
        (0, 2, False, "header"),
        (SLOT, 2, True, "header"),
        (SLOT + 1, 2, True, "steps"),
        (MAX_STEPS * SLOT, 8, True, "steps"),
        (MAX_STEPS * SLOT + 1, 2, True, "slices"),
        (GATHER_BYTES // 4, 4, False, "gather"),
        (GATHER_BYTES // 4 + 1, 4, False, "slices"),
        (GATHER_BYTES, 4, False, "slices"),
    ],
)
def test_way_of_a_reduction(nbytes, size, shared, chosen) -> None:
    payload = SLOT if shared else 128
    assert choose(nbytes, size, payload, shared) == chosen


def test_chunks_that_overlap_are_neither_tiny_nor_large_on_few_ranks() -> None:
    sizes = [overlapping_chunk(nbytes, 3) for nbytes in (0, 1, 1 << 20, 1 << 23, 1 << 24, 1 << 26)]
    assert sizes == [64, 64, 1 << 20, 2 << 20, 4 << 20, 4 << 20]


@given(
    st.integers(1, 1 << 40), st.integers(2, 1 << 20), st.none() | st.integers(64 << 10, 256 << 20)
)
def test_chunks_that_overlap_are_about_equally_long(nbytes, size, measured) -> None:
    chunk = overlapping_chunk(nbytes, size, measured)
    assert chunk % 64 == 0
    assert chunk <= 256 << 20
    count = -(-nbytes // chunk)
    # Whole elements of any length: no chunk has only what was left.
    assert count == -(-nbytes // (chunk // 16 * 16))
    assert count * chunk - nbytes <= 64 * count
    assert measured is None or measured // 2 <= chunk or nbytes <= chunk
    more = overlapping_chunk(nbytes, 4 * size, measured)
    assert -(-nbytes // more) <= count


def test_larger_messages_never_go_back_to_the_way_of_smaller_ones() -> None:
    order = ["header", "steps", "gather", "slices"]
    for shared, size in ((True, 4), (False, 4), (False, 2)):
        sizes = range(0, 1 << 22, 997)
        ways = [order.index(choose(n, size, SLOT, shared)) for n in sizes]
        assert ways == sorted(ways)
    # What travels with the header does not go step by step, nor through a segment.
    for payload in (64, 64 << 10, 1 << 20):
        assert most_in_steps(payload) >= payload


@example(size=2, count=1 << 22, itemsize=16, measured=Crossovers(chunk=32 << 20))
@example(size=20, count=1 << 22, itemsize=16, measured=Crossovers())
@example(size=50, count=1 << 16, itemsize=16, measured=Crossovers(gather=1 << 20))
# The smallest chunks of the largest array between the most ranks have millions of slices.
@settings(deadline=None)
@given(
    size=st.integers(2, 4096),
    count=st.integers(1, 1 << 22),
    itemsize=st.sampled_from((1, 2, 4, 8, 16)),
    measured=st.builds(
        Crossovers,
        gather=st.none() | st.integers(0, 1 << 18),
        chunk=st.none() | st.integers(64 << 10, 256 << 20),
    ),
)
def test_scratch_memory_is_taken_beforehand(size, count, itemsize, measured) -> None:
    """Of the rank whose slices are the longest, and whose `take` would fail after the header otherwise."""
    taken: list[int] = []

    class TakenError(Exception):
        pass

    def take(count, dtype):
        taken.append(count * dtype.itemsize)
        raise TakenError

    link: Any = SimpleNamespace(
        rank=size - 1, size=size, overlaps=True, crossovers=measured, take=take, slot=(-1, False)
    )
    link.native, link.chunk_bytes = lambda *_: False, 0
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
