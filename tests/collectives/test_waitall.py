"""Waiting for many requests at once."""

from __future__ import annotations

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from tests.support import internals
from tests.support.on_ranks import each_rank_of


@each_rank_of("few")
def test_results_are_in_the_order_of_the_requests(comm: Communicator) -> None:
    other = comm.dup()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    requests = [
        comm.irecv(left),
        other.iallreduce(comm.rank),
        comm.ibarrier(),
        comm.isend(np.full(20_000, comm.rank), right),
        comm.iallgather(comm.rank),
    ]
    order = np.random.default_rng(comm.rank).permutation(len(requests))
    results = dict(zip(order, ac.waitall([requests[k] for k in order]), strict=True))
    assert (results[0] == left).all()
    assert results[1] == sum(range(comm.size))
    assert results[2] is None
    assert results[3] is None
    assert results[4].tolist() == list(range(comm.size))
    assert ac.waitall([]) == []


@each_rank_of(3)
def test_error_of_the_first_is_raised_once_all_are_finished(comm: Communicator) -> None:
    requests = [
        comm.iallreduce(np.ones(40_000)),
        comm.iallreduce(1.0 if comm.rank else "no"),
        comm.ibcast(1.0 if comm.rank else "wrong too", 0),
        comm.iallreduce(np.ones(40_000)),
    ]
    with pytest.raises((TypeError, ac.PeerError), match="allreduce"):
        ac.waitall(requests)
    assert all(internals.is_finished(request) for request in requests)
    assert (requests[3].wait() == comm.size).all()


@each_rank_of("few")
def test_requests_of_a_generator_are_all_started_first(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine = np.full(20_000, comm.rank)
    starts = (lambda: comm.isend(mine, right), lambda: comm.irecv(left))
    results = ac.waitall(start() for start in starts)
    assert (results[1] == left).all()
