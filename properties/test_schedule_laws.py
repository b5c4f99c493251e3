"""Laws of interleavings: which rank runs when does not show in any result."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arraycomm import Communicator, _launch, allreduce_tree
from arraycomm.testing import run
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.frameworks import elements_of
from arraycomm.testing.strategies import ArrayCase

pytestmark = pytest.mark.skipif(
    _launch.detect(os.environ) is not None, reason="runs where pytest is alone"
)

# What travels with the header, what takes several steps, and what is cut into slices.
COUNTS = st.sampled_from((0, 5, 9_000, 70_000))


@st.composite
def _programs(draw: st.DrawFn) -> list[tuple[str, str, int]]:
    """Draw calls: the dtype, the reduction, and how many elements."""
    call = st.tuples(ranked.reductions(), COUNTS).map(lambda drawn: (*drawn[0], drawn[1]))
    return draw(st.lists(call, min_size=1, max_size=4))


def _argument(comm: Communicator, number: int, dtype: str, count: int) -> Any:
    seed = 1 + number * comm.size + comm.rank
    return ArrayCase(dtype, (count,), seed=seed).build()


def _blocking(comm: Communicator, program: list[tuple[str, str, int]]) -> list[bytes]:
    results = []
    for number, (dtype, op, count) in enumerate(program):
        x = _argument(comm, number, dtype, count)
        root = number % comm.size
        reduced = comm.reduce(x, op, root)
        results += [
            comm.allreduce(x, op),
            comm.bcast(x if comm.rank == root else None, root),
            comm.allgather(x),
            *([] if reduced is None else [reduced]),
            *allreduce_tree([x, x[: count // 2]], op, comm=comm),
        ]
    return [elements_of(result).tobytes() for result in results]


def _outstanding(
    comm: Communicator, program: list[tuple[str, str, int]], orders: list[list[int]]
) -> list[bytes]:
    """Start all calls on a communicator and its duplicate, and wait in any order."""
    other = comm.dup()
    requests = [
        group.iallreduce(_argument(comm, number, dtype, count), op)
        for number, (dtype, op, count) in enumerate(program)
        for group in (comm, other)
    ]
    results = {number: requests[number].wait() for number in orders[comm.rank]}
    return [results[number].tobytes() for number in range(len(requests))]


@given(size=st.integers(1, 4), program=_programs(), seed=st.integers(0, 2**24 - 1))
def test_blocking_calls_do_not_depend_on_the_schedule(size, program, seed) -> None:
    assert run(size, _blocking, program, schedule=seed) == run(size, _blocking, program)


@given(size=st.integers(1, 4), program=_programs(), seed=st.integers(0, 2**24 - 1), data=st.data())
def test_requests_do_not_depend_on_the_schedule(size, program, seed, data) -> None:
    order = st.permutations(range(2 * len(program)))
    orders = [data.draw(order) for _ in range(size)]
    scheduled = run(size, _outstanding, program, orders, schedule=seed)
    assert scheduled == run(size, _outstanding, program, orders)


@given(size=st.integers(1, 4), program=_programs(), seed=st.integers(0, 2**24 - 1))
def test_every_schedule_gives_all_ranks_the_same_bits(size, program, seed) -> None:
    def reduce(comm: Communicator) -> list[bytes]:
        return [
            comm.allreduce(_argument(comm, number, dtype, count), op).tobytes()
            for number, (dtype, op, count) in enumerate(program)
        ]

    results = run(size, reduce, schedule=seed)
    assert all(result == results[0] for result in results)
