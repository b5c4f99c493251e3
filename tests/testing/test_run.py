from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.testing import Schedule, run
from arraycomm.testing._internals import LastStep
from arraycomm.testing._ranks import threads as _threads
from arraycomm.testing._ranks.rank_links import Left, fault_of


def test_results_come_by_rank() -> None:
    # More ranks than cores.
    assert run(16, lambda comm: comm.allreduce(comm.rank)) == [120] * 16
    with pytest.raises(ValueError, match="size, the first argument, must be at least 1"):
        run(0, lambda comm: None)
    with pytest.raises(TypeError, match="size, the first argument, must be an integer; got"):
        run(print, 3)  # type: ignore[arg-type]
    assert run(5, lambda comm, x: (comm.rank, comm.size, x), "x") == [
        (rank, 5, "x") for rank in range(5)
    ]


@pytest.mark.parametrize("forgotten", [ac.init, ac.world, ac.join])
def test_a_communicator_that_is_forgotten_is_no_world_of_one_rank(forgotten) -> None:
    with pytest.raises(ac.NotInitializedError, match=r"ranks are threads here.*pass comm"):
        run(2, lambda comm: forgotten())


def test_receives_that_were_given_up_are_no_messages_that_were_lost() -> None:
    assert fault_of([Left(unmatched=-1), Left()]) == ""
    assert "no rank has received a message" in fault_of([Left(unmatched=1), Left()])


def test_first_failure_is_raised_with_its_rank_and_the_others_are_told() -> None:
    seen: list[ac.PeerError] = []

    def fail(comm) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError("on purpose")
        try:
            comm.dup()
        except ac.PeerError as error:
            seen.append(error)
            raise

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        run(3, fail)
    raised, *others = caught.value.__notes__
    assert raised == "raised on rank 1 of 3"
    assert [note[:38] for note in others] == [
        f"rank {rank} raised arraycomm.PeerError: rank"[:38] for rank in (0, 2)
    ]
    assert [error.rank for error in seen] == [1, 1]
    assert all("on purpose" in error.traceback for error in seen)


def test_rank_that_returns_early_ends_the_others_wait() -> None:
    def leave(comm) -> None:
        if comm.rank:
            comm.barrier()

    with pytest.raises(ac.PeerError, match="rank 0 has reached the end of its program"):
        run(2, leave)


@pytest.fixture
def _all_threads_end() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        # One that pushes requests on ends when it next looks whether there are any.
        thread.join(5)
    assert [thread.name for thread in left if thread.is_alive()] == []


@pytest.mark.usefixtures("_all_threads_end")
def test_no_thread_is_left_behind_with_requests_outstanding() -> None:
    def fail(comm) -> None:
        comm.iallreduce(np.ones(10**5))
        if comm.rank == 0:
            raise ValueError

    for _ in range(5):
        with pytest.raises(ValueError):
            run(4, fail, timeout=5)


def _deadlock(comm) -> None:
    other = comm.dup()
    (comm if comm.rank else other).barrier()


@pytest.mark.usefixtures("_all_threads_end")
def test_deadlock_is_raised_with_the_place_of_each_rank() -> None:
    with pytest.raises(ac.CommTimeoutError, match="is missing") as caught:
        run(3, _deadlock, timeout=0.5)
    raised, *others = caught.value.__notes__
    assert raised == "raised on rank 0 of 3"
    for rank, note in enumerate(others, 1):
        assert note.startswith(f"rank {rank} raised arraycomm.CommTimeoutError: waited")
        assert "in _deadlock" in note
        assert "_engine.py" not in note


@pytest.mark.usefixtures("_all_threads_end")
def test_rank_stuck_in_python_is_interrupted() -> None:
    def spin(comm) -> None:
        while comm.rank == 1:
            with suppress(Exception):
                time.sleep(0.001)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        run(2, spin, timeout=0.5)
    [_, note] = caught.value.__notes__
    assert "rank 1 did not end in time, and was interrupted here" in note
    assert "in spin" in note


def test_rank_stuck_outside_python_is_reported_and_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_threads, "HOPELESS", 0.5)
    release = threading.Event()

    def block(comm) -> None:
        if comm.rank == 1:
            release.wait()
        else:
            raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError) as caught:
            run(2, block, timeout=0.2)
    finally:
        release.set()
    [_, note] = caught.value.__notes__
    assert "rank 1 did not end in time, and cannot be interrupted outside Python" in note
    assert "release.wait()" in note


@pytest.mark.usefixtures("_all_threads_end")
def test_interrupt_of_the_caller_ends_all_ranks() -> None:
    def wait(comm) -> None:
        if comm.rank == 1:
            # To the process, as Ctrl-C: one of this thread's own would not wake the caller.
            os.kill(os.getpid(), signal.SIGINT)
        while comm.rank == 1:
            time.sleep(0.001)
        comm.barrier()

    with pytest.raises(KeyboardInterrupt):
        run(3, wait, timeout=60)


def test_error_that_is_shown_does_not_depend_on_time() -> None:
    def fail(comm, late) -> None:
        comm.barrier()
        if comm.rank == late:
            time.sleep(0.01)
        raise ValueError(comm.rank)

    for late in (0, 1, 2):
        with pytest.raises(ValueError, match="0"):
            run(3, fail, late)


def test_own_error_is_shown_rather_than_what_followed_from_it() -> None:
    def fail(comm) -> None:
        if comm.rank == 2:
            raise ZeroDivisionError
        try:
            comm.barrier()
        except ac.PeerError as error:
            raise RuntimeError("gives up") from error

    with pytest.raises(ZeroDivisionError):
        run(3, fail)


def test_schedule_is_replayed() -> None:
    def race(comm, order) -> None:
        for _ in range(5):
            order.append(comm.rank)
            comm.barrier()

    orders: list[list[int]] = [[] for _ in range(10)]
    for seed, order in enumerate(orders):
        again: list[int] = []
        run(3, race, order, schedule=seed)
        run(3, race, again, schedule=seed)
        assert order == again
    assert len({tuple(order) for order in orders}) > 3


def test_failure_under_a_schedule_says_how_to_replay_it() -> None:
    schedule = Schedule(3, faults=1.0)
    with pytest.raises(ac.TransportError, match="injected fault") as caught:
        run(2, lambda comm: comm.barrier(), schedule=schedule)
    assert f"replay it with schedule={schedule!r}" in caught.value.__notes__


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, pytest.skip.Exception])
def test_exceptions_that_are_no_errors_come_through(kind) -> None:
    def stop(comm) -> None:
        if comm.rank == 1:
            raise kind("enough")
        comm.barrier()

    with pytest.raises(kind, match="enough"):
        run(2, stop)


def test_last_step_that_others_gave_up_does_not_wait_for_them() -> None:
    """Each rank fails, and hears of the others' failures before the last of them comes."""
    turns = [threading.Event() for _ in range(3)]

    def leave(comm: ac.Communicator) -> tuple[bool, bool]:
        if comm.rank:
            assert turns[comm.rank - 1].wait(60)
        last = LastStep(comm, f"rank {comm.rank} failed")
        last.tell()
        turns[comm.rank].set()
        return last.complete(20.0)

    assert run(3, leave) == [(False, True)] * 3
