"""The timeout of one call, in place of its communicator's."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm.testing import run
from tests.support.on_ranks import alone, each_rank_of

Call = Callable[[Communicator, float | None], Any]

CALLS: dict[str, Call] = {
    "allreduce": lambda c, t: c.allreduce(1.0, timeout=t),
    "reduce": lambda c, t: c.reduce(1.0, timeout=t),
    "bcast": lambda c, t: c.bcast(1.0, 1, timeout=t),
    "allgather": lambda c, t: c.allgather(1.0, timeout=t),
    "allgatherv": lambda c, t: c.allgatherv(np.ones(2), timeout=t),
    "gather": lambda c, t: c.gather(1.0, timeout=t),
    "gatherv": lambda c, t: c.gatherv(np.ones(2), timeout=t),
    "scatter": lambda c, t: c.scatter(np.ones(2), 1, timeout=t),
    "scatterv": lambda c, t: c.scatterv(np.ones(2), [1, 1], 1, timeout=t),
    "reduce_scatter": lambda c, t: c.reduce_scatter(np.ones(2), timeout=t),
    "alltoall": lambda c, t: c.alltoall(np.ones(2), timeout=t),
    "alltoallv": lambda c, t: c.alltoallv(np.ones(2), [1, 1], timeout=t),
    "scan": lambda c, t: c.scan(1.0, timeout=t),
    "exscan": lambda c, t: c.exscan(1.0, timeout=t),
    "barrier": lambda c, t: c.barrier(timeout=t),
    "bcast_object": lambda c, t: c.bcast_object({}, 1, timeout=t),
    "allgather_object": lambda c, t: c.allgather_object({}, timeout=t),
    "gather_object": lambda c, t: c.gather_object({}, timeout=t),
    "plan": lambda c, t: c.plan([1.0], timeout=t),
    "send": lambda c, t: c.send(np.ones(30_000), 1 - c.rank, timeout=t),
    "recv": lambda c, t: c.recv(1 - c.rank, timeout=t),
    "send_object": lambda c, t: c.send_object(b"x" * 300_000, 1 - c.rank, timeout=t),
    "recv_object": lambda c, t: c.recv_object(1 - c.rank, timeout=t),
    "probe": lambda c, t: (c.probe(1 - c.rank, timeout=t), c.recv(1 - c.rank)),
    "maxloc": lambda c, t: c.maxloc(1.0, timeout=t),
    "minloc": lambda c, t: c.minloc(1.0, timeout=t),
    "sendrecv": lambda c, t: c.sendrecv(1.0, 1 - c.rank, 1 - c.rank, timeout=t),
}
OTHERS = {"send": "recv", "recv": "send", "probe": "send"}
OTHERS |= {"send_object": "recv_object", "recv_object": "send_object"}
TREES: dict[str, Call] = {
    "synchronize": lambda c, t: ac.synchronize([1.0], comm=c, timeout=t),
    "allreduce_tree": lambda c, t: ac.allreduce_tree([1.0], comm=c, timeout=t),
    "allreduce_gradients": lambda c, t: ac.allreduce_gradients([1.0], comm=c, timeout=t),
}


def test_every_blocking_call_has_a_timeout() -> None:
    found = {
        name
        for name, method in inspect.getmembers(Communicator, inspect.isfunction)
        if "timeout" in inspect.signature(method).parameters
    }
    assert found == set(CALLS)


@alone
@pytest.mark.parametrize("name", CALLS | TREES)
def test_call_waits_as_long_as_its_own_timeout_says(name) -> None:
    """Rank 1 comes too late for the call of rank 0 once, and too late for the communicator's."""
    call = (CALLS | TREES)[name]

    def check(comm: Communicator) -> float:
        first, second = comm.dup(), comm.dup(timeout=0.05)
        started = time.monotonic()
        if comm.rank == 0:
            with pytest.raises(ac.CommTimeoutError, match=r"\(timeout 0\.05 s\)"):
                call(first, 0.05)
            with pytest.raises(ac.CommunicatorClosedError):
                first.barrier()
        comm.barrier()
        waited = time.monotonic() - started
        if comm.rank == 1:
            time.sleep(0.15)
        # One rank sends, the other receives.
        other = OTHERS.get(name, name)
        (CALLS | TREES)[name if comm.rank == 0 else other](second, math.inf)
        return waited

    assert max(run(2, check)) < 5


@each_rank_of(3)
def test_timeout_holds_for_one_call_on_one_rank(comm: Communicator) -> None:
    impatient = comm.dup(timeout=0.4)
    assert impatient.allreduce(1, timeout=None if comm.rank else np.int64(2)) == comm.size
    if comm.rank == 0:
        with pytest.raises(ac.CommTimeoutError, match=r"\(timeout 0\.4 s\)"):
            impatient.allreduce(1)
    comm.barrier()


@each_rank_of(3)
def test_wrong_timeout_of_a_message_is_told_to_its_receiver(comm: Communicator) -> None:
    for wrong, kind in ((0, ValueError), (-1.0, ValueError), ("1", TypeError), (True, TypeError)):
        if comm.rank == 1:
            with pytest.raises(kind, match="send: timeout must be"):
                comm.send(1.0, 0, timeout=wrong)  # type: ignore[arg-type]
        elif comm.rank == 0:
            with pytest.raises(ac.PeerError, match="timeout must be"):
                comm.recv(1)
    assert comm.allreduce(1) == comm.size


@alone
@each_rank_of(2)
def test_waiting_for_earlier_requests_counts_from_the_call(comm: Communicator) -> None:
    """The request has waited for longer than the call may when the call begins."""
    if comm.rank == 0:
        request = comm.iallreduce(1)
        time.sleep(1.6)
        assert comm.allreduce(2, timeout=1.5) == 4
        assert request.wait() == 2
    else:
        time.sleep(1.8)
        assert comm.iallreduce(1).wait() == 2
        comm.allreduce(2)
