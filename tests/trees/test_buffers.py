"""Memory for the results of trees: used again, but never while anything refers to it."""

from __future__ import annotations

import numpy as np

from arraycomm._trees.buffers import BufferPool


def _address(buffer: np.ndarray) -> int:
    return int(buffer.__array_interface__["data"][0])


def test_buffers_are_used_again_however_many_results_are_kept() -> None:
    """Several plans of like trees have one pool, and a program may keep the results of all of them."""
    pool = BufferPool(64)
    kept = [pool.acquire()[0] for _ in range(5)]
    addresses = {_address(buffer) for buffer in kept}
    assert len(addresses) == 5
    for step in range(10):
        kept[step % 5] = np.empty(0)
        buffer, new = pool.acquire()
        assert not new
        assert _address(buffer) in addresses
        kept[step % 5] = buffer[3:7]
    assert len({_address(buffer) for buffer in kept}) == 5


def test_few_buffers_are_kept_of_which_nothing_is_used() -> None:
    pool = BufferPool(64)
    kept = [pool.acquire()[0] for _ in range(5)]
    kept.clear()
    again = [pool.acquire() for _ in range(3)]
    assert [new for _, new in again] == [False, False, True]


def test_few_buffers_are_kept_in_all() -> None:
    pool = BufferPool(64)
    kept = [pool.acquire()[0] for _ in range(10)]
    # Those that came last are not used again.
    del kept[8:]
    assert pool.acquire()[1]
    del kept[0]
    assert not pool.acquire()[1]


def test_buffers_without_bytes_are_all_new() -> None:
    pool = BufferPool(0)
    assert [pool.acquire()[1] for _ in range(2)] == [True, True]
