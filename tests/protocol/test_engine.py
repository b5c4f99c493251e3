from __future__ import annotations

import numpy as np
import pytest

from arraycomm._protocol.waiting import wait_for
from arraycomm._transports.threads import ThreadsTransport, make_group
from tests.support import internals


class _Unthreaded(ThreadsTransport):
    """As over an MPI that allows one thread."""

    threaded = False


def test_request_that_is_thrown_away_is_no_failure() -> None:
    """The garbage collector ends its program, in the middle of whatever else goes on."""
    [first, *_] = make_group(2)
    comm = internals.communicator(_Unthreaded(first._group, 0))
    comm.iallreduce(np.ones(3))
    internals.drop_first_task(comm)
    assert not internals.is_closed(comm)


def test_all_that_is_outstanding_can_be_given_up() -> None:
    [first, *_] = make_group(2)
    comm = internals.communicator(_Unthreaded(first._group, 0))
    requests = [comm.iallreduce(np.ones(3)), comm.iallreduce(np.ones(50_000)), comm.irecv(1)]
    internals.engine(comm).give_up_all(ZeroDivisionError("given up"))
    internals.engine(comm).advance()
    assert internals.engine(comm).idle
    for request in requests:
        with pytest.raises(ZeroDivisionError, match="given up"):
            request.wait()


def test_what_came_while_a_rank_looked_for_the_absent_counts() -> None:
    """A rank that has left because of what came is not the cause: the step that came tells it."""
    came = False

    def watch(waited: float) -> None:
        nonlocal came
        came = True
        raise ZeroDivisionError

    wait_for(lambda: came, 0, watch)
    with pytest.raises(ZeroDivisionError):
        wait_for(lambda: False, 0, watch)
