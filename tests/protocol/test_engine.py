from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stderr

import numpy as np
import pytest

from arraycomm._errors import CommTimeoutError, CommunicatorClosedError, TransportError
from arraycomm._protocol.task import Task
from arraycomm._protocol.waits.outcomes import Outcome, Outcomes
from arraycomm._protocol.waits.waiting import wait_for
from arraycomm._transports.threads import ThreadsTransport, make_group
from tests.support import internals
from tests.support.on_ranks import alone

# Nothing in it depends on what else runs.
pytestmark = alone


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


def test_who_must_not_be_held_up_begins_nothing_but_what_follows() -> None:
    [alone] = make_group(1)
    engine, begun = internals.engine(internals.communicator(alone)), []

    def program(name: str) -> Iterator[None]:
        yield from ()
        begun.append(name)

    engine.follow(program("header"))
    engine.queue.append(Task(program("what may wait for a device")))
    engine.push_follower()
    assert begun == ["header"]
    assert len(engine.queue) == 1


class _Staged:
    """Waits for this rank's own device for some seconds, and then for other ranks."""

    def __init__(self, own: float, others: float) -> None:
        self._own = time.monotonic() + own
        self._others = self._own + others

    @property
    def local(self) -> bool:
        return time.monotonic() < self._own

    def done(self) -> bool:
        return time.monotonic() >= self._others


@pytest.mark.parametrize("as_request", [False, True])
def test_waits_for_what_is_ones_own_do_not_count(as_request: bool) -> None:
    [alone] = make_group(1)
    comm = internals.communicator(alone)
    internals.set_timeout(comm, 0.2)
    engine = internals.engine(comm)

    def through(handle: _Staged) -> Iterator[_Staged]:
        yield handle
        return "through"

    def drive(handle: _Staged) -> object:
        program = through(handle)
        return engine.finish(engine.submit(program)) if as_request else engine.run(program)

    assert drive(_Staged(0.8, 0.0)) == "through"
    assert drive(_Staged(0.4, 0.05)) == "through"
    with pytest.raises(CommTimeoutError):
        drive(_Staged(0.1, 30))


def test_error_that_another_thread_has_seen_is_the_one_that_a_call_raises() -> None:
    """What the call itself hears is only that its communicator was aborted."""
    [alone] = make_group(1)
    comm = internals.communicator(alone)

    def aborted() -> Iterator[None]:
        yield from ()
        group.deferred_error = CommTimeoutError("rank 1 is missing")
        group.close(group.deferred_error)
        raise TransportError("the NCCL communicator was aborted")

    group = internals.group(comm)
    with pytest.raises(CommTimeoutError, match="rank 1 is missing"):
        group.run(aborted())
    with pytest.raises(CommunicatorClosedError, match="rank 1 is missing"):
        comm.barrier()


def test_requests_that_failed_are_reported_only_where_there_is_a_standard_error(capsys) -> None:
    for closed in (False, True):
        outcomes = Outcomes()
        outcome = Outcome(outcomes, "train.py:7")
        outcome.finish(ValueError("wrong"))
        with redirect_stderr(None) if closed else nullcontext():
            assert not outcomes.report()
    assert capsys.readouterr().err.count("the request made at train.py:7 failed") == 1
