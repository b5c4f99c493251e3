from __future__ import annotations

import pytest

from arraycomm._collectives.selection import GATHER_BYTES, MAX_STEPS, choose

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


def test_larger_messages_never_go_back_to_the_way_of_smaller_ones() -> None:
    order = ["header", "steps", "gather", "slices"]
    for shared in (True, False):
        ways = [order.index(choose(n, 4, SLOT, shared)) for n in range(0, 1 << 21, 997)]
        assert ways == sorted(ways)
