"""Messages between two ranks: what is sent arrives, in order, beside everything else."""

from __future__ import annotations

import gc
import signal
import threading
import time
import warnings
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._messages import envelopes, messages
from arraycomm._transports.threads import SelfTransport
from arraycomm.testing import run
from tests.support import internals
from tests.support.launcher import needs_mpiexec, run_python
from tests.support.on_ranks import alone, each_rank_of
from tests.support.oracle import same_bits

Array = np.ndarray[Any, Any]

# The bytes that travel with an envelope, at most.
ROOM = envelopes.ROOM
# Elements of float64 that travel with the envelope, and that follow it.
SHORT, LONG = 5, 20_000
LENGTHS = [SHORT, LONG]
TIMEOUT = 0.6


def _ring(comm: Communicator) -> tuple[int, int]:
    """The ranks to send to and to receive from."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def _numbered(count: int, *numbers: int) -> Array:
    """An array that no other arguments give."""
    return np.random.default_rng((count, *numbers)).standard_normal(count)


# What arrives; that layouts, frameworks and orders of waiting do not matter are laws.


@each_rank_of(2)
def test_what_is_said_of_a_structure_takes_room_in_the_envelope(comm: Communicator) -> None:
    right, left = _ring(comm)
    for count in range(ROOM - 80, ROOM + 1):
        mine = np.full(count, comm.rank + 1, np.uint8).view([("a", "u1")])
        got = comm.sendrecv(mine, right, left)
        assert got.tobytes() == bytes([left + 1]) * count


# Frameworks


@each_rank_of(2)
def test_numbers_arrive_as_numbers_where_one_is_asked_for(comm: Communicator) -> None:
    right, left = _ring(comm)
    got = comm.sendrecv(comm.rank + 0.5, right, left, like=0.0)
    assert type(got) is float
    assert got == left + 0.5
    array = comm.sendrecv(3, right, left)
    assert same_bits(array, np.asarray(3))


PARTS: dict[str, Callable[[Array], Array]] = {
    "same": lambda memory: memory[2:],
    "shifted": lambda memory: memory[:-2],
    "reversed": lambda memory: memory[2:][::-1],
}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("requests", [False, True], ids=["alone", "beside_requests"])
@each_rank_of(2)
def test_elements_go_into_memory_of_the_array_that_is_sent(
    comm: Communicator, kind, requests
) -> None:
    right, left = _ring(comm)
    for count in LENGTHS:
        memory = np.empty(count + 2)
        x, out = memory[2:], PARTS[kind](memory)
        x[...] = _numbered(count, comm.rank)
        pending = [comm.iallreduce(1)] * requests
        assert comm.sendrecv(x, right, left, out=out) is out
        assert np.array_equal(out, _numbered(count, left))
        ac.waitall(pending)


# Beside collectives


@each_rank_of(3)
def test_messages_do_not_wait_for_requests_started_before_them(comm: Communicator) -> None:
    x = np.ones(30_000)
    for count in LENGTHS:
        if comm.rank == 0:
            request = comm.iallreduce(x)
            comm.send(_numbered(count, 1), 1)
            assert np.array_equal(comm.recv(1), _numbered(count, 2))
        else:
            if comm.rank == 1:
                assert np.array_equal(comm.recv(0), _numbered(count, 1))
                comm.send(_numbered(count, 2), 0)
            request = comm.iallreduce(x)
        assert (request.wait() == comm.size).all()


@each_rank_of(3)
def test_receives_progress_while_a_collective_is_waited_for(comm: Communicator) -> None:
    # The second time, a small reduction goes the short way.
    for elements in np.repeat((3, 3_000, 200_000), 3):
        x = np.ones(elements)
        if comm.rank == 0:
            out = np.empty(LONG)
            receiving = comm.irecv(1, out=out)
            assert (comm.allreduce(x) == comm.size).all()
            assert np.array_equal(out, _numbered(LONG, 1))
            receiving.wait()
        else:
            if comm.rank == 1:
                comm.send(_numbered(LONG, 1), 0)
            assert (comm.allreduce(x) == comm.size).all()


def _wait_for_another_communicator(comm: Communicator) -> None:
    other = comm.dup()
    if comm.rank == 0:
        receiving = other.irecv(1)
        comm.barrier()
        assert np.array_equal(receiving.wait(), _numbered(LONG, 1))
    else:
        if comm.rank == 1:
            other.send(_numbered(LONG, 1), 0)
        comm.barrier()


test_messages_progress_while_another_communicator_is_waited_for = each_rank_of(3)(
    _wait_for_another_communicator
)


@alone
def test_without_a_thread_whoever_waits_pushes_on_the_messages_of_other_communicators() -> None:
    run(3, _wait_for_another_communicator, schedule=0, timeout=10.0)


@each_rank_of(2)
def test_messages_progress_while_the_caller_does_something_else(comm: Communicator) -> None:
    peer, out = 1 - comm.rank, np.empty(LONG)
    requests = [comm.irecv(peer, out=out), comm.isend(_numbered(LONG, comm.rank), peer)]
    deadline = time.monotonic() + 10
    while not all(internals.is_finished(r) for r in requests) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert all(internals.is_finished(request) for request in requests)
    assert np.array_equal(out, _numbered(LONG, peer))
    comm.barrier()


@each_rank_of("few")
def test_blocking_messages_start_no_thread(comm: Communicator) -> None:
    def refuse() -> None:
        raise AssertionError("a thread was started for a message that is waited for")

    internals.call_instead_of_progress_thread(comm, refuse)
    right, left = _ring(comm)
    for count in LENGTHS:
        comm.sendrecv(_numbered(count, comm.rank), right, left)
        if comm.rank == 0 and comm.size > 1:
            comm.send(_numbered(count, 0), right)
        elif comm.rank == 1:
            assert np.array_equal(comm.recv(0), _numbered(count, 0))


# Other communicators


@each_rank_of("few")
def test_messages_outlive_the_freeing_of_their_communicator(comm: Communicator) -> None:
    right, left = _ring(comm)
    for count in LENGTHS:
        with comm.dup() as other:
            requests = [other.irecv(left), other.isend(_numbered(count, comm.rank), right)]
        assert np.array_equal(requests[0].wait(), _numbered(count, left))
        assert requests[1].wait() is None
        with pytest.raises(ac.CommunicatorClosedError, match="it was freed"):
            other.send(1, right)


# Wrong arguments


@each_rank_of(2)
def test_wrong_source_is_raised_once_the_other_half_is_done(comm: Communicator) -> None:
    if comm.rank == 0:
        with pytest.raises(ValueError, match="recv: source"):
            comm.sendrecv(_numbered(LONG, 0), 1, comm.size)
    elif comm.rank == 1:
        assert np.array_equal(comm.recv(0), _numbered(LONG, 0))
    comm.barrier()


WIDE = np.dtype([(f"field{k}", "f4") for k in range(8000)])

WRONG_ARRAYS: dict[str, tuple[type[Exception], Any]] = {
    "big integer": (OverflowError, 2**70),
    "description too long": (TypeError, np.zeros(2, WIDE)),
    "nothing in it": (TypeError, np.zeros(2, [])),
}


@pytest.mark.parametrize("case", WRONG_ARRAYS)
@each_rank_of(2)
def test_wrong_array_is_raised_by_both_and_the_ranks_go_on(comm: Communicator, case) -> None:
    kind, wrong = WRONG_ARRAYS[case]
    if comm.rank == 0:
        with pytest.raises(kind, match="send"):
            comm.send(wrong, 1, 4)
        comm.send(_numbered(LONG, 0), 1, 4)
    elif comm.rank == 1:
        with pytest.raises(ac.PeerError, match=r"rank 0 raised instead of sending") as caught:
            comm.recv(0, 4)
        assert caught.value.rank == 0
        assert kind.__name__ in caught.value.traceback
        assert "test_messages.py" in caught.value.traceback
        assert np.array_equal(comm.recv(0, 4), _numbered(LONG, 0))
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_wrong_array_of_an_exchange_is_raised_once_the_other_half_is_done(
    comm: Communicator,
) -> None:
    right, left = _ring(comm)
    mine = {} if comm.rank == 0 else _numbered(LONG, comm.rank)
    if comm.rank == 0:
        with pytest.raises(TypeError, match="send"):
            comm.sendrecv(mine, right, left)
    elif left == 0:
        with pytest.raises(ac.PeerError):
            comm.sendrecv(mine, right, left)
    else:
        assert np.array_equal(comm.sendrecv(mine, right, left), _numbered(LONG, left))
    assert comm.allreduce(1) == comm.size
    # If the arrays of all ranks are wrong, each raises what is wrong with its own.
    for dest, source in ((right, left), (comm.rank, comm.rank)):
        with pytest.raises(TypeError, match="send"):
            comm.sendrecv({}, dest, source)
    assert comm.allreduce(1) == comm.size


@each_rank_of(2, "torch")
def test_dtype_that_the_framework_lacks_is_raised_by_the_receiver_alone(
    comm: Communicator, torch
) -> None:
    for count in (2, 5_000):
        if comm.rank == 0:
            comm.send(np.zeros(count, "datetime64[s]"), 1)
        elif comm.rank == 1:
            with pytest.raises(TypeError, match="torch has no dtype"):
                comm.recv(0, like=torch.zeros(1))
        assert comm.allreduce(1) == comm.size


# Nobody sends, nobody receives


@each_rank_of(3)
def test_all_receives_that_nobody_sends_say_what_they_wait_for(comm: Communicator) -> None:
    impatient = comm.dup(timeout=TIMEOUT)
    if comm.rank:
        requests = [impatient.irecv(0, tag) for tag in range(3)]
        for tag in (2, 0, 1):
            with pytest.raises(ac.CommTimeoutError, match=r"timeout 0\.6 s") as caught:
                requests[tag].wait()
            assert f"recv from rank 0 with tag {tag} at test_messages.py:" in str(caught.value)
        with pytest.raises(ac.CommunicatorClosedError, match="CommTimeoutError"):
            impatient.recv(0, 5)
    comm.barrier()
    if comm.rank == 0:
        for peer, tag in product(range(1, comm.size), range(3)):
            impatient.send(1, peer, tag)
    assert comm.allreduce(1) == comm.size


@each_rank_of(2)
def test_message_that_comes_too_late_finds_its_memory_in_place(
    comm: Communicator, transport
) -> None:
    if transport == "threads":
        pytest.skip("the receiver fetches from threads; MPI writes")
    impatient = comm.dup(timeout=TIMEOUT)
    # Other tests may have left some that nobody will ever finish.
    before = set(internals.mpi_movements())
    if comm.rank == 1:
        requests = [impatient.irecv(0) for _ in range(3)]
        for request in requests:
            with pytest.raises(ac.CommTimeoutError):
                request.wait()
        del requests, request
        internals.forget_interruption(impatient)
        gc.collect()
        assert len(internals.mpi_movements() - before) == 3
    comm.barrier()
    if comm.rank == 0:
        for _ in range(3):
            impatient.send(np.ones(SHORT), 1)
    comm.barrier()
    for movement in internals.mpi_movements() - before:
        while not movement.done():
            time.sleep(0.001)


@each_rank_of(2)
def test_wait_with_a_timeout_can_be_repeated(comm: Communicator) -> None:
    for count in LENGTHS:
        if comm.rank == 0:
            comm.barrier()
            comm.send(_numbered(count, 0), 1)
            continue
        request = comm.irecv(0)
        assert not request.test()
        with pytest.raises(ac.CommTimeoutError, match=r"not finished after 0\.05 seconds"):
            request.wait(timeout=0.05)
        comm.barrier()
        assert np.array_equal(request.wait(), _numbered(count, 0))
        assert request.test()


@each_rank_of(3)
def test_messages_with_a_rank_that_failed_raise_with_its_traceback(comm: Communicator) -> None:
    other = comm.dup()
    if comm.rank == 0:
        with pytest.raises(ZeroDivisionError), other:
            raise ZeroDivisionError("lost my way")
    else:
        with pytest.raises(ac.PeerError, match="lost my way") as caught:
            other.recv(0) if comm.rank == 1 else other.send(np.ones(1_000_000), 0)
        assert caught.value.rank == 0
        with pytest.raises(ac.CommunicatorClosedError, match="PeerError"):
            other.send(1, 0)
    assert comm.allreduce(1) == comm.size


def test_message_that_nobody_receives_never_reaches_another_communicator(on_ranks) -> None:
    """MPI gives the place of a freed communicator to the next one, and what waits there with it."""
    frees = 0

    def check(comm: Communicator) -> None:
        nonlocal frees
        for _ in range(3):
            other = comm.dup()
            # Its messages are received.
            other.sendrecv(0, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
            if comm.rank == 0:
                other.send(-1, 1, 7)
                other.send(-2, 1, 8)
            elif comm.rank == 1:
                assert other.recv(0, 8) == -2
            other.free()
            frees += 1
            with comm.dup() as fresh:
                if comm.rank == 0:
                    fresh.send(1, 1, 7)
                elif comm.rank == 1:
                    assert fresh.recv(0, 7) == 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(3, check)
    said = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert said == frees * ["free: 1 of the messages that were sent have never been received"]


@alone
def test_long_message_keeps_its_number_while_it_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many others go meanwhile: numbers begin anew."""
    monkeypatch.setattr(messages, "TAGS", 8)

    def rank(comm: Communicator) -> None:
        x = [_numbered(LONG, tag) for tag in range(3)]
        if comm.rank == 0:
            sent = [comm.isend(x[tag], 1, tag) for tag in (1, 2)]
            for tag in [0] * 20:
                comm.send(x[tag], 1, tag)
            sent.append(comm.isend(x[0], 1, 3))
            ac.waitall(sent)
        else:
            for tag in [*[0] * 20, 3, 2, 1]:
                np.testing.assert_array_equal(comm.recv(0, tag), x[tag % 3])

    run(2, rank)


@alone
@each_rank_of(2)
def test_message_of_a_rank_that_failed_has_some_time_to_arrive(comm: Communicator) -> None:
    class Late:
        """What has been sent, and is seen only after many polls."""

        def __init__(self, handle: Any) -> None:
            self.handle, self.polls = handle, 0

        def done(self) -> bool:
            self.polls += 1
            return self.polls > 20 and self.handle.done()

    other = comm.dup()
    if comm.rank == 0:
        other.send(1, 1)
        with pytest.raises(ZeroDivisionError), other:
            raise ZeroDivisionError
    comm.barrier()
    if comm.rank == 1:
        recv = internals.transport(other).recv
        internals.transport(other).recv = lambda *args: Late(recv(*args))  # type: ignore[method-assign]
        assert other.recv(0) == 1


@each_rank_of(2)
def test_mismatch_ends_receives_that_nobody_sends_any_more(comm: Communicator) -> None:
    broken = comm.dup()
    request = broken.irecv((comm.rank + 1) % comm.size)
    with pytest.raises(ac.MismatchError):
        broken.allreduce(np.ones(3 + comm.rank))
    started = time.monotonic()
    with pytest.raises((ac.PeerError, ac.CommunicatorClosedError)):
        request.wait()
    assert time.monotonic() - started < 10
    comm.barrier()
    # So that MPI is left with nothing under way.
    _, left = _ring(broken)
    internals.transport(broken).send(np.zeros(1, np.uint8), left, 0)
    comm.barrier()


@alone
@each_rank_of(3)
def test_receive_from_a_rank_that_has_finished_raises(comm: Communicator) -> None:
    if comm.rank:
        with pytest.raises(ac.PeerError, match="rank 0 has reached the end of its program"):
            comm.recv(0)


@alone
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer of the system")
def test_interrupted_receive_takes_no_later_message() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    comm = internals.communicator(SelfTransport())
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            comm.recv(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert internals.waits_for_no_message(comm)
    with pytest.raises(ac.CommunicatorClosedError, match="KeyboardInterrupt"):
        comm.recv(0)


class _Full(SelfTransport):
    """Has no room for messages."""

    def send(self, buffer: Any, dest: int, tag: int) -> Any:
        return SimpleNamespace(done=lambda: False)


@alone
def test_timeout_of_a_short_message_closes_the_communicator_as_that_of_a_long_one() -> None:
    comm = internals.communicator(_Full())
    with pytest.raises(ac.CommTimeoutError, match="send to rank 0 with tag 0 at test_mes"):
        comm.send(np.ones(SHORT), 0, timeout=0.1)
    with pytest.raises(ac.CommunicatorClosedError, match="CommTimeoutError"):
        comm.send(np.ones(SHORT), 0, timeout=0.1)


# The end of a program

# Without a thread, nothing makes progress between the calls.
DROPPED = """
import warnings, numpy as np, arraycomm as ac
from tests.support import internals
comm = ac.init()
internals.forbid_progress_thread(comm)
right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
out = np.zeros(20_000)
comm.isend(np.full(20_000, comm.rank + 1.0), right)
comm.irecv(left, out=out)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ac.finalize()
assert (out == left + 1).all()
assert {warning.category for warning in caught} == {RuntimeWarning}
assert sorted(str(warning.message).partition(";")[0] for warning in caught) == [
    f"the request made at <string>:{line} was never waited for" for line in (8, 9)
]
"""


@needs_mpiexec
def test_dropped_messages_are_completed_at_the_end_of_a_job() -> None:
    """With a warning for each that says where it was made."""
    done = run_python("-c", DROPPED, ranks=2)
    assert done.returncode == 0, done.stderr


# What is told of messages


@each_rank_of(2)
def test_request_says_where_it_was_made(comm: Communicator) -> None:
    request = comm.irecv(comm.rank)
    assert "under way" in repr(request)
    comm.send(1, comm.rank)
    request.wait()
    assert repr(request).startswith("<Request made at test_messages.py:")
    assert "finished" in repr(request)


@each_rank_of(3)
def test_each_thread_has_messages_on_a_communicator_of_its_own(comm: Communicator) -> None:
    comms = [comm.dup() for _ in range(3)]
    right, left = _ring(comm)
    wrong: list[int] = []

    def exchange(number: int) -> None:
        for k in range(10):
            mine = _numbered(LENGTHS[k % 2], comm.rank, number, k)
            got = comms[number].sendrecv(mine, right, left)
            if not np.array_equal(got, _numbered(LENGTHS[k % 2], left, number, k)):
                wrong.append(k)

    threads = [threading.Thread(target=exchange, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
