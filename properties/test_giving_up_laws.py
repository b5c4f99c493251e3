"""Laws of calls that a rank gives up, at any moment: nobody gets the result of a call that failed."""

from __future__ import annotations

import ctypes
import dis
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import Communicator
from arraycomm._native import compiled
from arraycomm._transports.lives import Lives
from arraycomm._transports.processes.transport import ProcessesTransport, memory_bytes
from arraycomm.testing import given
from arraycomm.testing import strategies as ranked
from arraycomm.testing._ranks.rank_groups import RankGroup, Threads, lockstep_over
from properties.test_laws import TIMEOUT
from properties.test_machine import LAUNCHED
from tests.support import internals

Call = Callable[[Communicator, float | None], Any]

# What travels with the header; what goes through a segment or in several steps; and what moves.
COUNTS = (3, 9_000, 200_000)


def made(count: int, value: float = 1.0) -> dict[str, Call]:
    """Return calls by their names, which need the other ranks; requests are waited for."""
    x, maximum = np.full(count, value), ac.op(np.maximum)
    return {
        "allreduce": lambda c, t: c.allreduce(x, timeout=t),
        "maximum": lambda c, t: c.allreduce(x, maximum, timeout=t),
        "reduce": lambda c, t: c.reduce(x, timeout=t),
        "bcast": lambda c, t: c.bcast(x, timeout=t),
        "allgather": lambda c, t: c.allgather(x, timeout=t),
        "allgatherv": lambda c, t: c.allgatherv(x, timeout=t),
        "gather": lambda c, t: c.gather(x, timeout=t),
        "scatter": lambda c, t: c.scatter(np.full((c.size, count), value), timeout=t),
        "reduce_scatter": lambda c, t: c.reduce_scatter(np.full((c.size, count), value), timeout=t),
        "alltoall": lambda c, t: c.alltoall(np.full((c.size, count), value), timeout=t),
        "scan": lambda c, t: c.scan(x, timeout=t),
        "barrier": lambda c, t: c.barrier(timeout=t),
        "objects": lambda c, t: c.allgather_object(bytes([int(value)]) * count, timeout=t),
        "tree": lambda c, t: ac.allreduce_tree({"x": x, "y": x}, comm=c, timeout=t),
        "request": lambda c, t: c.iallreduce(x).wait(),
        "dup": lambda c, t: c.dup(),
    }


# Calls that a rank may end before others come, if headers are not compared.
ALONE = {"reduce", "bcast", "gather", "scatter", "scan"}

Message = tuple[Callable[[Communicator, list[Any]], Any], Callable[[Communicator], Any]]


def message(count: int, value: float = 1.0) -> dict[str, Message]:
    """Return messages between two ranks by their names, and what each rank gets.

    A call puts its request into the list.
    """

    def x(rank: int) -> Any:
        return np.full(count, 10.0 * value + rank)

    def wait(requests: list[Any], request: Any) -> Any:
        requests.append(request)
        return request.wait()

    def sent(send: Any, receive: Any) -> Message:
        return (
            lambda c, r: receive(c, r) if c.rank else send(c, r),
            lambda c: x(0) if c.rank else None,
        )

    def send(c: Communicator, _: Any) -> None:
        c.send(x(0), 1)

    def recv(c: Communicator, _: Any) -> Any:
        return c.recv(0)

    def send_object(c: Communicator, _: Any) -> None:
        c.send_object(x(0), 1)

    return {
        "blocking": sent(send, recv),
        "out": sent(send, lambda c, _: c.recv(0, out=np.empty(count))),
        "any source": sent(send, lambda c, _: c.recv(ac.ANY_SOURCE)),
        "timeout": sent(
            lambda c, _: c.send(x(0), 1, timeout=20), lambda c, _: c.recv(0, timeout=20)
        ),
        "isend": sent(lambda c, r: wait(r, c.isend(x(0), 1)), recv),
        "irecv": sent(send, lambda c, r: wait(r, c.irecv(0))),
        "irecv of any": sent(send, lambda c, r: wait(r, c.irecv(ac.ANY_SOURCE, ac.ANY_TAG))),
        "objects": sent(send_object, lambda c, _: c.recv_object(0)),
        "requests of objects": sent(
            lambda c, r: wait(r, c.isend_object(x(0), 1)), lambda c, r: wait(r, c.irecv_object(0))
        ),
        "sendrecv": (
            lambda c, _: c.sendrecv(x(c.rank), 1 - c.rank, 1 - c.rank),
            lambda c: x(1 - c.rank),
        ),
    }


def over_rings(size: int) -> list[ProcessesTransport]:
    memory = np.zeros(memory_bytes(size), np.uint8)
    return [ProcessesTransport(memory, rank, size, Lives({})) for rank in range(size)]


class Stop(BaseException):
    """What interrupts a wait, as Ctrl-C does."""


class TimeUpError(Exception):
    """What the handler of an alarm raises, which is no `BaseException` alone."""


INTERRUPTS = st.sampled_from((Stop, TimeUpError))


def by_its_limit(c: Communicator, call: Call) -> None:
    call(c, 0.02)


def by_an_interrupt(c: Communicator, call: Call) -> None:
    thread = ctypes.c_ulong(threading.get_ident())
    raise_there = ctypes.pythonapi.PyThreadState_SetAsyncExc
    threading.Timer(0.02, raise_there, (thread, ctypes.py_object(Stop))).start()
    call(c, None)


def by_an_error_beside_it(c: Communicator, call: Call) -> None:
    request = None
    try:
        with c:
            request = c.iallreduce(np.ones(3))
            raise Stop
    finally:
        with pytest.raises(ac.ArrayCommError):
            request.wait()


WAYS = {"limit": by_its_limit, "interrupt": by_an_interrupt, "error": by_an_error_beside_it}


PACKAGE = str(Path(ac.__file__).parent)
TESTING = str(Path(ac.testing.__file__).parent)


# The instructions behind which Python looks for an interrupt.
LOOKS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME"}
# The functions with which a call begins, in these modules.
BEGIN = {("fast_path", "call"), ("fast_path", "start"), ("runner", "call_within")}
BEGIN |= {("messages", name) for name in ("send", "recv", "isend", "irecv", "sendrecv")}
BEGIN |= {("calls", f"{name}_object") for name in ("send", "recv", "isend", "irecv")}


class Moments:
    """Counts the moments at which this thread can be interrupted in a part of the library; stops at one.

    Python calls it as it does a signal's handler: with the frame that it interrupts.
    """

    def __init__(
        self, last: int = -1, part: str = PACKAGE, raises: type[BaseException] = Stop
    ) -> None:
        self.last, self.count, self._part, self._raises = last, 0, part, raises
        # Whether a call had begun when it stopped.
        self.inside = False
        self._before: tuple[Any, int] | None = None

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._part) or code.co_filename.startswith(TESTING):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            place, before, self._before = frame.f_lasti, self._before, (frame, frame.f_lasti)
            if before is not None and before[0] is frame and is_moment(code, before[1], place):
                self.count += 1
                if self.count == self.last:
                    began = dis.opname[code.co_code[before[1]]] == "RESUME"
                    self.inside = has_begun(frame.f_back if began else frame)
                    raise self._raises
        return self

    def of(self, call: Callable[[], Any]) -> Any:
        before, reached = sys.gettrace(), self.count >= self.last
        sys.settrace(self)
        try:
            result = call()
        finally:
            sys.settrace(before)
        assert reached or self.count < self.last, "the interrupt is lost"
        return result


def has_begun(frame: Any) -> bool:
    while frame is not None:
        if (Path(frame.f_code.co_filename).stem, frame.f_code.co_name) in BEGIN:
            return True
        frame = frame.f_back
    return False


@cache
def is_moment(code: Any, before: int, place: int) -> bool:
    """Return whether an interrupt may come behind an instruction, and the next has the handler that it gets there."""
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    handlers = [[e.target for e in table if e.start <= at < e.end] for at in (before, place)]
    return dis.opname[code.co_code[before]] in LOOKS and handlers[0] == handlers[1]


# An interrupt may come while Python calls a destructor, which tells of it and goes on: the call then ends by its limit.
@pytest.mark.filterwarnings("ignore:(?s).*Stop:pytest.PytestUnraisableExceptionWarning")
class GivingUp:
    """Subclasses say over what."""

    @given(
        ranks=range(2, 4),
        first=ranked.roots(),
        names=st.sets(st.sampled_from(sorted(made(0))), min_size=4, max_size=4),
        count=st.sampled_from(COUNTS),
        way=st.sampled_from(sorted(WAYS)),
        before=st.integers(0, 2),
        check=st.booleans(),
        timeout=TIMEOUT,
    )
    def test_a_call_that_begins_after_another_rank_gave_up_raises(
        self,
        comm: Communicator,
        first: int,
        names: set[str],
        count: int,
        way: str,
        before: int,
        check: bool,
    ) -> None:
        limit = 0.02 if way == "limit" else None
        for name in sorted(names):
            compared = check or name in ALONE
            c, call = comm.dup(timeout=1.0, check=compared), made(count)[name]
            for _ in range(before):
                call(c, None)
            if way == "limit" and name in ("request", "dup"):
                c = comm.dup(timeout=limit, check=compared)
            # The wait for a request may be interrupted, and begin again.
            beside = way == "error" or (way == "interrupt" and name == "request")
            call = made(3)["request"] if beside else call
            if comm.rank == first:
                with pytest.raises((ac.CommTimeoutError, Stop)):
                    WAYS["error" if beside else way](c, call)
            comm.barrier()
            if comm.rank != first:
                with pytest.raises((ac.PeerError, ac.CommTimeoutError)):
                    call(c, None)
            comm.barrier()

    @given(
        ranks=range(2, 4),
        # What a function has reduced on one rank moves to the others afterwards.
        name=st.sampled_from(sorted(set(made(0)) - {"dup", "maximum"})),
        before=st.integers(0, 2),
        begins=ranked.per_rank(st.sampled_from((0.0, 0.01, 0.02, 0.03))),
        limit=ranked.per_rank(st.sampled_from((0.002, 0.012, 0.022, 1.0))),
        timeout=TIMEOUT,
    )
    def test_a_step_that_one_rank_gives_up_ends_alike_on_all(
        self, comm: Communicator, name: str, before: int, begins: float, limit: float
    ) -> None:
        """A limit passes while others come: either all have the result, or nobody has."""
        c, call, ended_well = comm.dup(timeout=4), made(3)[name], False
        for _ in range(before):
            call(c, None)
        comm.barrier()
        time.sleep(begins)
        with suppress(ac.CommTimeoutError, ac.PeerError):
            call(c, limit)
            ended_well = True
        ends = comm.allgather_object(ended_well)
        # What goes by messages may have crossed the notice.
        assert len(set(ends)) == 1 or not internals.is_shared(comm)

    @given(
        ranks=range(2, 4),
        first=ranked.roots(),
        name=st.sampled_from(sorted(set(made(0)) - {"dup"})),
        count=st.sampled_from(COUNTS),
        moment=st.integers(1, 12) | st.floats(0, 1),
        raises=INTERRUPTS,
        timeout=TIMEOUT,
    )
    def test_an_interrupt_at_any_moment_leaves_nobody_a_wrong_result(
        self, comm: Communicator, first: int, name: str, count: int, moment: float, raises: Any
    ) -> None:
        c, patient, seen = comm.dup(timeout=1.0), comm.dup(), Moments()
        call, later = made(count)[name], made(count, comm.rank + 2.0)[name]
        for each in (c, patient):
            want = later(each, None)
        # To count them takes long.
        wants = want, seen.of(lambda: call(patient, None))
        call(c, None)
        # One of the first, before the others can know of the call; or any.
        last = moment if isinstance(moment, int) else 1 + int(moment * seen.count)
        stopping = Moments(last if comm.rank == first else -1, raises=raises)
        begun, stopped = internals.steps(c), False
        comm.barrier()
        with suppress(ac.ArrayCommError):
            try:
                np.testing.assert_equal(stopping.of(lambda: call(c, None)), wants[1])
            except raises:
                stopped = True
                internals.engine(c).outcomes.open.clear()
            if stopped and internals.steps(c) == begun:
                assert internals.is_closed(c) or not stopping.inside
                np.testing.assert_equal(call(c, None), wants[1])
        # One like it, with other data, by which a rank that is out of step would be misled.
        with suppress(ac.ArrayCommError):
            np.testing.assert_equal(later(c, None), wants[0])
        comm.barrier()

    @given(
        ranks=range(2, 3),
        first=ranked.roots(),
        way=st.sampled_from(sorted(message(0))),
        count=st.sampled_from(COUNTS),
        before=st.integers(0, 3),
        moment=st.integers(1, 12) | st.floats(0, 1),
        raises=INTERRUPTS,
        timeout=TIMEOUT,
    )
    def test_a_message_interrupted_at_any_moment_leaves_nobody_a_wrong_result(
        self,
        comm: Communicator,
        first: int,
        way: str,
        count: int,
        before: int,
        moment: float,
        raises: Any,
    ) -> None:
        c, patient, seen = comm.dup(timeout=1.0), comm.dup(), Moments()
        calls = [message(count, number)[way] for number in range(before + 3)]
        for call, wanted in calls[:before]:
            for each in (c, patient):
                np.testing.assert_equal(call(each, []), wanted(each))
        call, wanted = calls[before]
        np.testing.assert_equal(call(c, []), wanted(c))
        # To count them takes long.
        np.testing.assert_equal(seen.of(lambda: call(patient, [])), wanted(c))
        last = moment if isinstance(moment, int) else 1 + int(moment * seen.count)
        stopping = Moments(last if comm.rank == first else -1, raises=raises)
        under_way = list[Any]()
        call, wanted = calls[before + 1]
        comm.barrier()
        # A request raises an interrupt of its steps to all who wait for it.
        with suppress(ac.ArrayCommError, raises):
            try:
                got = stopping.of(lambda: call(c, under_way))
            except raises:
                assert internals.is_closed(c) or not stopping.inside
                assert compiled is None or not internals.engine(c).turn.locked()
                if not under_way:
                    # It may have been interrupted between two instructions: nobody has the request.
                    internals.engine(c).outcomes.open.clear()
                got = under_way[0].wait() if under_way else call(c, under_way)
            np.testing.assert_equal(got, wanted(c))
        call, wanted = calls[before + 2]
        with suppress(ac.ArrayCommError):
            np.testing.assert_equal(call(c, []), wanted(c))
        comm.barrier()


if LAUNCHED:
    from properties.test_laws import over_mpi

    class TestSharedMemory(GivingUp):
        def _group(self) -> RankGroup:
            return lockstep_over(over_mpi(share=True))

    class TestMessages(GivingUp):
        def _group(self) -> RankGroup:
            return lockstep_over(over_mpi(share=False))

    def test_a_wait_between_nodes_interrupted_at_any_moment_goes_on_or_raises() -> None:
        world, part = over_mpi(share=False), f"{PACKAGE}/_transports/mpi"
        moments, last, wrong = Moments(part=part), 0, list[Any]()
        # The first ones begin messages and take them; then it looks for one again and again.
        while last <= min(world.bcast_object(moments.count), 60):
            c, requests = world.dup(timeout=1.0), list[Any]()
            for before in (40, 3, 17):
                c.allreduce(np.ones(before))
            begin = moments if last == 0 else Moments(last if world.rank == 0 else -1, part)
            # Every fourth moment: each takes as long as the end of a group.
            last, want = last + 4, np.full(5, c.size * (c.size + 1) / 2)

            def call(c: Communicator = c, requests: list[Any] = requests) -> Any:
                requests.append(c.iallreduce(np.full(5, c.rank + 1.0)))
                return requests[0].wait()

            with suppress(ac.ArrayCommError, Stop):
                try:
                    got = begin.of(call)
                except Stop:
                    got = requests[0].wait() if requests else want
                wrong += [] if np.array_equal(got, want) else [(last, got)]
            world.barrier()
        assert not wrong

else:

    class TestThreads(GivingUp):
        pass

    class TestProcesses(GivingUp):
        def _group(self) -> RankGroup:
            return Threads(over_rings)
