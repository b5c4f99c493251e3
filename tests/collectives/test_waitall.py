"""Waiting for many requests at once."""

from __future__ import annotations

from threading import Event
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm.testing import run
from tests.support import internals
from tests.support.on_ranks import each_rank_of


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
    assert ac.waitall([]) == []


@each_rank_of(3)
def test_the_first_that_ends_is_waited_for(comm: Communicator) -> None:
    other = comm.dup()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    requests = [comm.irecv(left), other.iallreduce(np.ones(20_000))]
    assert not ac.testall(requests)
    for seconds in (0.01, np.int64(0)):
        with pytest.raises(ac.CommTimeoutError, match="none of 1 requests is finished"):
            ac.waitany(requests[:1], timeout=seconds)
    comm.barrier()
    place, total = ac.waitany(requests)
    assert (place, total[0]) == (1, comm.size)
    comm.barrier()
    comm.send(comm.rank, right)
    place, got = ac.waitany(requests[:1])
    assert (place, int(got)) == (0, left)
    assert ac.testall(requests)
    assert ac.testall([])
    with pytest.raises(ValueError, match="waitany: requests must be one at least; got none"):
        ac.waitany([])


@each_rank_of(3)
def test_the_error_of_the_one_that_ends_is_raised(comm: Communicator) -> None:
    left, other = (comm.rank - 1) % comm.size, comm.dup()
    good = other.irecv(left)
    wrong = comm.iallreduce(1.0 if comm.rank else "no")
    with pytest.raises((TypeError, ac.PeerError), match="allreduce"):
        ac.waitany([good, wrong])
    comm.barrier()
    other.send(1, (comm.rank + 1) % comm.size)
    assert int(good.wait()) == 1


@pytest.mark.parametrize("comes", [True, False])
def test_a_rank_that_ends_or_does_not_come_ends_the_wait(comes: bool) -> None:
    waited = Event()

    def wait(comm: Communicator) -> None:
        if comm.rank == 0:
            assert comes or waited.wait(60)
            return
        what = "has reached the end of its program" if comes else "was in no collective so far"
        error = ac.PeerError if comes else ac.CommTimeoutError
        requests = [comm.irecv(0), comm.irecv(0, tag=1)]
        try:
            with pytest.raises(error, match=f"rank 0 {what}"):
                ac.waitany(requests)
        finally:
            waited.set()
        for request in requests:
            with pytest.raises(ac.ArrayCommError):
                request.wait()

    run(2, wait, timeout=1.0)


@each_rank_of(2)
def test_a_wrong_timeout_is_refused_whether_or_not_there_is_something_to_wait_for(
    comm: Communicator,
) -> None:
    ended, waiting = comm.iallreduce(1.0), comm.irecv(1 - comm.rank)
    assert ended.wait() == 2
    for call in (ended.wait, waiting.wait, lambda t: ac.waitany([ended, waiting], timeout=t)):
        for wrong in (-1.0, float("nan")):
            with pytest.raises(ValueError, match=f"timeout must be positive, or None; got {wrong}"):
                call(wrong)
    comm.send(1.0, 1 - comm.rank)
    assert waiting.wait() == 1


@pytest.mark.parametrize("call", [ac.waitall, ac.waitany, ac.testall])
@each_rank_of(2)
def test_what_is_no_request_is_refused_by_name(comm: Communicator, call: Any) -> None:
    request = comm.iallreduce(1.0)
    with pytest.raises(TypeError, match=f"{call.__name__}: requests must be .* got NoneType"):
        call([request, None])
    assert request.wait() == 2
