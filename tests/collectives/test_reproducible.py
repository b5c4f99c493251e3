"""The same inputs give the same bits: on every transport, under every MPI, however they travel.

The digests below were made once, from the reductions as tests/collectives/oracle.py writes them down.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._reduce import selection
from tests.support.on_ranks import SIZES, alone
from tests.support.oracle import CASES, expected

Array = np.ndarray[Any, Any]

COUNTS = (1, 33, 9_000)
DIGESTS = {
    1: "ad4830cadbde82a1",
    2: "7b6547c47ccd7887",
    3: "7b9d1d778edbe2af",
    4: "272689e61680cda0",
}


def _values(dtype: np.dtype[Any], count: int, rank: int) -> Array:
    """Numbers whose sums depend on their order, and none of whose results is NaN."""
    rng = np.random.default_rng((rank, count))
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    if dtype.kind in "iu":
        return rng.integers(0, 256, (count, dtype.itemsize), np.uint8).view(dtype).reshape(count)
    values = rng.standard_normal(count)
    return (values + 1j * rng.standard_normal(count) if dtype.kind == "c" else values).astype(dtype)


def _digest(results: list[Array]) -> str:
    found = hashlib.sha256()
    for result in results:
        # Which zero min and max choose is not promised.
        found.update((result + np.zeros((), result.dtype)).tobytes())
    return found.hexdigest()[:16]


@lru_cache
def _inputs(rank: int) -> list[tuple[Array, str]]:
    return [(_values(dtype, count, rank), op) for dtype, op in CASES for count in COUNTS]


def _oracle(size: int) -> str:
    everyone = [_inputs(rank) for rank in range(size)]
    return _digest([expected([x for x, _ in xs], xs[0][1]) for xs in zip(*everyone, strict=True)])


# In chunks of which there are several, or one; that their size does not matter is a law.
@pytest.mark.parametrize(
    ("size", "chunk"), [(size, 1 << 22 if size % 2 else 1 << 14) for size in SIZES]
)
def test_same_bits_on_every_transport_and_by_every_way(on_ranks, size, chunk, monkeypatch) -> None:
    monkeypatch.setattr(selection, "CHUNK_BYTES", chunk)

    def check(comm: Communicator) -> list[str]:
        inputs = _inputs(comm.rank)
        one_by_one = [comm.allreduce(x, op) for x, op in inputs]
        started = [comm.iallreduce(x, op) for x, op in inputs]
        ops = sorted({op for _, op in inputs})
        fused: dict[int, Array] = {}
        for op in ops:
            places = [place for place, (_, other) in enumerate(inputs) if other == op]
            tree = ac.allreduce_tree([inputs[place][0] for place in places], op, comm=comm)
            fused.update(zip(places, tree, strict=True))
        reduced = [comm.bcast(comm.reduce(x, op, root=0)) for x, op in inputs]
        ways = [one_by_one, ac.waitall(started), [fused[n] for n in range(len(inputs))], reduced]
        return [_digest(results) for results in ways]

    found = {digest for digests in on_ranks(size, check)[:size] for digest in digests}
    assert found == {DIGESTS[size]}


@alone
@pytest.mark.parametrize("size", DIGESTS)
def test_digests_are_those_of_the_oracle(size) -> None:
    assert _oracle(size) == DIGESTS[size]
