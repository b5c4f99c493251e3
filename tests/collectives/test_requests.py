from __future__ import annotations

import inspect
import time
import warnings
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm.testing import run
from tests.support import internals
from tests.support.on_ranks import each_rank_of


@each_rank_of(3)
def test_request_is_not_finished_before_every_rank_has_started_it(comm: Communicator) -> None:
    other = comm.dup()
    if comm.rank > 0:
        comm.barrier()
    request = other.iallreduce(1)
    if comm.rank == 0:
        assert not request.test()
        comm.barrier()
    assert request.wait() == comm.size
    assert request.test()


@each_rank_of(3, "torch")
def test_nonblocking_forms_give_what_is_like_the_example(comm: Communicator, torch) -> None:
    x, like = np.ones((comm.size, 2)), torch.ones(1)
    calls = [
        (comm.ibcast, (x,), (None,)),
        (comm.iscatter, (x,), (None,)),
        (comm.iscatterv, (x, [1] * comm.size), (None, None)),
    ]
    for start, sent, nothing in calls:
        got = start(*(nothing if comm.rank else sent), like=like).wait()
        assert type(got) is (torch.Tensor if comm.rank else np.ndarray)


def test_nonblocking_forms_take_the_arguments_of_the_blocking_ones() -> None:
    names = [name for name in dir(Communicator) if hasattr(Communicator, f"i{name}")]
    assert len(names) >= 15
    for name in names:
        blocking = dict(inspect.signature(getattr(Communicator, name)).parameters)
        # `wait` takes that of a request.
        del blocking["timeout"]
        assert inspect.signature(getattr(Communicator, f"i{name}")).parameters == blocking, name


@each_rank_of("few")
def test_requests_progress_while_the_caller_does_something_else(comm: Communicator) -> None:
    out = np.empty(60_000)
    request = comm.iallreduce(np.ones(60_000), out=out)
    deadline = time.monotonic() + 10
    while not internals.is_finished(request) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert internals.is_finished(request)
    assert (out == comm.size).all()
    comm.barrier()


@pytest.mark.parametrize("begin", ["iallreduce", "irecv"])
@each_rank_of(3)
def test_thread_that_fails_ends_the_communicator_on_every_rank(
    comm: Communicator, begin: str
) -> None:
    other = comm.dup()
    if comm.rank:
        comm.barrier()
        with pytest.raises(ac.PeerError, match="OverflowError: planted"):
            other.allreduce(1)
        comm.barrier()
        return
    internals.fail_in_progress_thread(other, OverflowError("planted"))
    request = other.irecv(1) if begin == "irecv" else other.iallreduce(np.ones(3))
    said = (
        "the thread that makes progress on requests must not fail; it raised OverflowError: planted; "
        r"go on with another communicator, for example one that dup\(\) made before"
    )
    with pytest.raises(ac.TransportError, match=said):
        request.wait()
    with pytest.raises(ac.CommunicatorClosedError, match="must not fail"):
        other.allreduce(1)
    comm.barrier()
    # Until they have seen it, nobody leaves.
    comm.barrier()


@each_rank_of(3)
def test_mismatch_ends_all_that_is_outstanding(comm: Communicator) -> None:
    broken = comm.dup()
    first = broken.iallreduce(np.ones(3 + comm.rank))
    second = broken.iallreduce(np.ones(3))
    with pytest.raises(ac.CommunicatorClosedError, match="MismatchError"):
        second.wait()
    with pytest.raises(ac.MismatchError, match=r"test_requests\.py:"):
        first.wait()


@each_rank_of("few")
def test_timeout_error_of_the_program_is_its_own(comm: Communicator) -> None:
    def slow(one: Any, other: Any) -> Any:
        raise TimeoutError("the database did not answer")

    for call in (
        lambda: comm.iallreduce(np.ones(3), ac.op(slow)).wait(),
        lambda: ac.waitall([comm.iallreduce(np.ones(3), ac.op(slow))]),
    ):
        if comm.size == 1:
            call()
            continue
        with pytest.raises((TimeoutError, ac.PeerError)) as raised:
            call()
        assert not isinstance(raised.value, ac.CommTimeoutError)
        assert "the database did not answer" in str(raised.value)


def test_free_counts_the_requests_that_nobody_can_wait_for_any_more(on_ranks, few) -> None:
    # Under MPI, the test runs on the ranks beyond `size` as well.
    took_part: list[int] = []

    def check(comm: Communicator) -> None:
        other = comm.dup()
        for _ in range(5):
            other.iallreduce(np.ones(3))
        other.iallreduce(1).wait()
        tested = other.ibarrier()
        while not tested.test():
            time.sleep(1e-3)
        took_part.append(comm.rank)
        kept = other.iallreduce(2)
        other.free()
        assert kept.wait() == 2 * comm.size

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(few, check)
    found = {str(warning.message).partition(" made at test_requests.py:")[0] for warning in caught}
    assert found == ({"5 requests"} if took_part else set())


def test_error_of_a_request_that_nobody_waits_for_is_raised_by_run() -> None:
    def mismatch(comm: Communicator) -> None:
        comm.iallreduce(np.ones(3 + comm.rank))

    with pytest.raises(ac.MismatchError, match="called different things"):
        run(2, mismatch)
