from __future__ import annotations

import threading

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.testing import run


def test_results_come_by_rank() -> None:
    assert run(5, lambda comm, x: (comm.rank, comm.size, x), "x") == [
        (rank, 5, "x") for rank in range(5)
    ]


def test_first_failure_is_raised_with_its_rank() -> None:
    def fail(comm) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError("on purpose")
        comm.barrier()

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        run(3, fail)
    assert caught.value.__notes__[0] == "raised on rank 1 of 3"


def test_other_ranks_are_told_who_failed() -> None:
    seen: list[ac.PeerError] = []

    def fail(comm) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError("on purpose")
        part = comm.dup
        try:
            part()
        except ac.PeerError as error:
            seen.append(error)

    with pytest.raises(ZeroDivisionError):
        run(3, fail)
    assert [error.rank for error in seen] == [1, 1]
    assert all("on purpose" in error.traceback for error in seen)


def test_rank_that_returns_early_ends_the_others_wait() -> None:
    def leave(comm) -> None:
        if comm.rank:
            comm.barrier()

    with pytest.raises(ac.PeerError, match="rank 0 has reached the end of its program"):
        run(2, leave)


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()

    def fail(comm) -> None:
        comm.iallreduce(np.ones(10**5))
        if comm.rank == 0:
            raise ValueError

    for _ in range(5):
        with pytest.raises(ValueError):
            run(4, fail, timeout=5)
    for thread in threading.enumerate():
        if thread.name == "arraycomm-progress":
            thread.join(5)
    assert threading.active_count() == before


def test_deadlock_of_two_communicators_times_out() -> None:
    def deadlock(comm) -> None:
        other = comm.dup()
        (comm if comm.rank else other).barrier()

    with pytest.raises(ac.CommTimeoutError, match="is missing"):
        run(2, deadlock, timeout=2)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, pytest.skip.Exception])
def test_exceptions_that_are_no_errors_come_through(kind) -> None:
    def stop(comm) -> None:
        if comm.rank == 1:
            raise kind("enough")
        comm.barrier()

    with pytest.raises(kind, match="enough"):
        run(2, stop)


def test_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="size must be at least 1"):
        run(0, lambda comm: None)


def test_more_ranks_than_cores() -> None:
    assert run(16, lambda comm: comm.allreduce(comm.rank)) == [120] * 16
