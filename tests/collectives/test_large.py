"""Counts beyond 2³¹, which no 32-bit integer holds: run with LARGE=1, where memory allows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arraycomm._communicator import Communicator

Array = np.ndarray[Any, Any]

MIB = 1 << 20
# 2.2 GB, of an even number of blocks.
BLOCKS = 2_100
NEEDED = 14 << 30


def _available() -> int:
    """Bytes of memory that could be used, or 0 where nobody tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if "MemAvailable" in line), 0)


pytestmark = [
    pytest.mark.skipif(os.environ.get("LARGE") != "1", reason="takes minutes; set LARGE=1"),
    pytest.mark.skipif(_available() < NEEDED, reason="needs 14 GiB of free memory"),
]


def _blocks(array: Array) -> Iterator[Array]:
    yield from array.reshape(-1, MIB)


def _array(rank: int, first: int = 0, blocks: int = BLOCKS) -> Array:
    """Every MiB with a number of its own, and different between ranks."""
    array = np.empty(blocks * MIB, np.int8)
    for number, block in enumerate(_blocks(array), first):
        block[...] = _number(number, rank)
    return array


def _number(block: int, rank: int) -> int:
    return block % 53 + rank * 7


def _check(array: Array, numbers: list[int]) -> None:
    found = [(int(block.min()), int(block.max())) for block in _blocks(array)]
    assert found == [(number, number) for number in numbers]


def _numbers(rank: int, first: int = 0, blocks: int = BLOCKS) -> list[int]:
    return [_number(number, rank) for number in range(first, first + blocks)]


SUMS = [_number(block, 0) + _number(block, 1) for block in range(BLOCKS)]
HALF = BLOCKS // 2


def _gather_and_scatter(comm: Communicator) -> None:
    got = comm.gather(_array(comm.rank, 0, HALF), 1)
    if got is not None:
        _check(got, _numbers(0, 0, HALF) + _numbers(1, 0, HALF))
    _check(comm.scatter(got, 1), _numbers(comm.rank, 0, HALF))


def _gatherv_and_scatterv(comm: Communicator) -> None:
    got = comm.gatherv(_array(comm.rank) if comm.rank else np.empty(0, np.int8), 0)
    if got is not None:
        _check(got, _numbers(1))
    back = comm.scatterv(got, [0, BLOCKS * MIB], 0)
    assert len(back) == comm.rank * BLOCKS * MIB
    _check(back, _numbers(1) if comm.rank else [])


def _others(comm: Communicator) -> None:
    mine, lengths = comm.rank * HALF, [HALF - 50, HALF + 50]
    _check(comm.allreduce(x := _array(comm.rank), out=x), SUMS)
    _check(comm.bcast(x := _array(comm.rank), 1, out=x), _numbers(1))
    _check(comm.scan(x := _array(comm.rank), out=x), SUMS if comm.rank else _numbers(0))
    del x
    got = comm.allgatherv(_array(comm.rank, 0, lengths[comm.rank]))
    _check(got, _numbers(0, 0, lengths[0]) + _numbers(1, 0, lengths[1]))
    del got
    got = comm.alltoall(_array(comm.rank).reshape(2, -1))
    _check(got, _numbers(0, mine, HALF) + _numbers(1, mine, HALF))
    del got
    _check(comm.reduce_scatter(_array(comm.rank).reshape(2, -1)), SUMS[mine : mine + HALF])


@pytest.mark.parametrize("call", [_gather_and_scatter, _gatherv_and_scatterv, _others])
def test_more_than_two_to_the_31_elements(on_ranks, call) -> None:
    on_ranks(2, lambda comm: call(comm.dup(timeout=300.0)))
