from __future__ import annotations

import pytest

from arraycomm._collectives.selection import (
    CHUNK_BYTES,
    EXCHANGE_BYTES,
    GATHER_BYTES,
    MAX_STEPS,
    choose,
    overlapping_chunk,
)

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


@pytest.mark.parametrize(
    ("nbytes", "size", "chosen"),
    [
        (SLOT, 2, "header"),
        (SLOT + 1, 2, "exchange"),
        (EXCHANGE_BYTES, 2, "exchange"),
        (EXCHANGE_BYTES + 1, 2, "slices"),
        (SLOT + 1, 3, "slices"),
    ],
)
def test_two_ranks_between_nodes_exchange_what_is_not_large(nbytes, size, chosen) -> None:
    assert choose(nbytes, size, SLOT, False, overlaps=True) == chosen


def test_chunks_that_overlap_are_neither_tiny_nor_larger_than_others() -> None:
    sizes = [overlapping_chunk(nbytes) for nbytes in (1, 1 << 22, 1 << 23, 1 << 24, 1 << 30)]
    assert sizes == [1 << 20, 1 << 20, 2 << 20, CHUNK_BYTES, CHUNK_BYTES]


def test_larger_messages_never_go_back_to_the_way_of_smaller_ones() -> None:
    order = ["header", "steps", "gather", "exchange", "slices"]
    for shared, overlaps, size in ((True, False, 4), (False, False, 4), (False, True, 2)):
        sizes = range(0, 1 << 22, 997)
        ways = [order.index(choose(n, size, SLOT, shared, overlaps)) for n in sizes]
        assert ways == sorted(ways)
