"""One rank's part in a program: do what it says, and compare what comes back with NumPy's result."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pickle import PicklingError
from typing import Any, Final

import numpy as np

import arraycomm as ac
from arraycomm import Communicator, Request
from tests.faults import above, disturbances, optimizers
from tests.faults.oracle import agreed, differs, right_result
from tests.faults.programs import CUSTOM, DISTURBING, DTYPES, Action, Call, Program, harms
from tests.faults.values import ON_PURPOSE, OnPurposeError, argument, counts_of, custom_op

# The last two: of objects that cannot be pickled.
ARGUMENT_ERRORS: Final = (
    *(TypeError, ValueError, BufferError, OverflowError),
    *(PicklingError, AttributeError),
)
# Seconds that a slow rank takes: longer than it takes to find a deadlock.
LATE: Final = 1.8
SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT)
STATUSES: Final = (0, 3, None, "status")
DEATHS: Final = (0, 1, 7)


class ReleasedError(Exception):
    """Ends a rank that has slept until the others gave up."""


@dataclass
class Event:
    """How one action ended, and when: `kind` is "ok", "argument", "peer", "wrong" or "error"."""

    place: int
    began: float
    ended: float
    kind: str
    error: str = ""
    cause: str = ""
    rank: int = -1
    text: str = ""
    traceback: str = ""


@dataclass
class Trace:
    """What came of one rank's actions, in their order, and which one is under way."""

    events: list[Event] = field(default_factory=list)
    # The action that is under way, or that was the last.
    place: int = -1
    began: float = 0.0
    returned: bool = False
    tell: Callable[[dict[str, Any]], None] = lambda said: None

    def begin(self, place: int) -> None:
        self.place, self.began = place, time.monotonic()
        self.tell({"begin": place, "at": self.began})

    def end(self, kind: str, error: BaseException | None = None, text: str = "") -> None:
        cause = None if error is None else error.__cause__
        event = Event(self.place, self.began, time.monotonic(), kind)
        if error is not None:
            event.error, event.text = type(error).__name__, str(error)[:2000]
            event.cause = "" if cause is None else type(cause).__name__
            event.rank = getattr(error, "rank", -1)
            event.traceback = getattr(error, "traceback", "")[-2000:]
        event.text = text or event.text
        self.events.append(event)
        self.tell({"event": asdict(event)})

    def finish(self) -> None:
        self.returned = True
        self.tell({"returned": True})


def play(world: Communicator, program: Program, trace: Trace, rest: Callable[[], None]) -> None:
    """Do what the program says for this rank; raise where that ends early.

    `rest` is called by a rank that is to sleep for ever, and raises `ReleasedError` at last.
    """
    player = _Player(world, program, trace, rest)
    try:
        for place, action in enumerate(program.actions[world.rank]):
            if action.kind == "leave":
                return
            if player.lacks(action):
                continue
            trace.begin(place)
            _act(player, trace, place, action)
        # What may still come to this rank.
        player.signals.wait()
    except BaseException as error:
        trace.end("error", error)
        raise
    finally:
        # No process is left behind.
        player.signals.close()
    trace.finish()


def _act(player: _Player, trace: Trace, place: int, action: Action) -> None:
    """Do an action; return if the rank can go on."""
    try:
        wrong = player.act(place, action)
    except ac.PeerError as error:
        if not error.in_step:
            raise
        trace.end("peer", error)
    except ARGUMENT_ERRORS as error:
        trace.end("argument", error)
    except OnPurposeError as error:
        # Not what ends the rank, but what a function raised that the library has called.
        if action.kind not in ("call", "wait"):
            raise
        trace.end("argument", error)
    else:
        trace.end("wrong" if wrong else "ok", text=wrong)


class _Player:
    def __init__(
        self, world: Communicator, program: Program, trace: Trace, rest: Callable[[], None]
    ) -> None:
        self._rank = world.rank
        self._program = program
        self._trace = trace
        self._rest = rest
        self._comms: dict[int, Communicator] = {0: world}
        self._optimizers: dict[int, optimizers.Optimizer] = {}
        self._requests: dict[int, Request] = {}
        self.signals = disturbances.Signals()

    def act(self, place: int, action: Action) -> str:
        """Do an action; return what is wrong with its result, or an empty string."""
        wrong = "" if action.call is None else action.call.wrong
        if wrong == "memory" and action.kind == "call":
            # What is passed is there already; the call is to run out of memory, not its caller.
            self._right(place)
        if action.kind in ("call", "wait", "recv"):
            with disturbances.disturbed(wrong):
                got = self._result(action)
            return self._judged(place, got)
        if action.kind == "make":
            with disturbances.disturbed(wrong):
                return self._make(action)
        if action.kind in ("start", "isend", "irecv", "send"):
            with disturbances.disturbed(wrong):
                started = self._begin(action)
            if action.request >= 0:
                self._requests[action.request] = started
            return ""
        if action.kind in DISTURBING:
            return self._disturb(action)
        self._end(action)
        return ""

    def lacks(self, action: Action) -> bool:
        """Return whether an action needs what could not be made, since a rank had too little for it."""
        if action.kind == "wait":
            return action.request not in self._requests
        return action.comm not in self._comms

    def _disturb(self, action: Action) -> str:
        if action.kind == "slow":
            time.sleep(LATE if action.how % 6 == 0 else 0.02)
        elif action.kind == "stop":
            self.signals.stop(action.how)
        elif action.kind == "sigint":
            self.signals.interrupt(action.how)
        elif action.kind in ("suspend", "launcher"):
            # Meanwhile the launcher of the program stops all its ranks, or is killed.
            time.sleep(0.3 if action.kind == "suspend" else 3)
        elif action.kind == "fork":
            wrong = disturbances.fork(list(self._comms.values()), action.how)
            if wrong is None:
                self._trace.tell = lambda said: None
                sys.exit()
            return wrong
        return ""

    def _end(self, action: Action) -> None:
        if action.kind == "sleep":
            self._rest()
        elif action.kind == "raise":
            raise OnPurposeError(ON_PURPOSE)
        elif action.kind == "interrupt":
            raise KeyboardInterrupt(ON_PURPOSE)
        elif action.kind == "exit":
            sys.exit(STATUSES[action.how % len(STATUSES)])
        elif action.kind == "kill":
            os.kill(os.getpid(), SIGNALS[action.how % len(SIGNALS)])
            time.sleep(60)
        elif action.kind == "die":
            os._exit(DEATHS[action.how % len(DEATHS)])

    def _make(self, action: Action) -> str:
        comm, call = self._comms[action.comm], action.call
        assert call is not None
        if call.operation == "optimizer":
            self._optimizers[action.makes] = optimizers.make(comm, call)
            # The rank and the size of its own communicator are the same.
            self._comms[action.makes] = comm
            return ""
        if call.operation == "dup":
            made: Communicator | None = comm.dup(**({"foo": 1} if call.wrong == "dup" else {}))
        else:
            made = comm.split("a" if call.wrong == "split" else action.color)  # type: ignore[arg-type]
        members = self._program.members(action.makes, self._rank)
        if made is not None:
            self._comms[action.makes] = made
        got = (-1, 0) if made is None else (made.rank, made.size)
        right = (members.index(self._rank), len(members)) if members else (-1, 0)
        return "" if got == right else f"rank and size {got}, not {right}"

    def _result(self, action: Action) -> Any:
        if action.kind == "wait":
            return self._requests[action.request].wait()
        comm, call = self._comms[action.comm], action.call
        assert call is not None
        if call.operation == "update":
            return optimizers.update(self._optimizers[action.comm], call, comm.rank)
        if call.operation in above.OPERATIONS:
            return above.OPERATIONS[call.operation].play(comm, call)
        return self._begin(action)

    def _begin(self, action: Action) -> Any:
        comm, call = self._comms[action.comm], action.call
        assert call is not None
        if action.kind in ("recv", "irecv"):
            return getattr(comm, action.kind)(action.peer, action.tag)
        x = argument(call, comm.rank, comm.size)
        if action.kind in ("send", "isend"):
            return getattr(comm, action.kind)(x, action.peer, action.tag)
        arguments: list[Any] = [] if call.operation == "barrier" else [x]
        if call.operation == "alltoallv":
            arguments.append(counts_of(call, comm.rank, comm.size))
        name = f"i{call.operation}" if action.kind == "start" else call.operation
        return getattr(comm, name)(*arguments, **_keywords(call, comm))

    def _judged(self, place: int, got: Any) -> str:
        """Say what is wrong with a result, given what all ranks have passed to the call."""
        action = self._program.actions[self._rank][place]
        if action.kind == "wait":
            place = self._program.started(self._rank, action.request)
            action = self._program.actions[self._rank][place]
        if action.kind == "isend":
            return ""
        if action.kind in ("recv", "irecv"):
            sent = sent_call(self._program, self._rank, place)
            return "nobody has sent it" if sent is None else differs(got, *sent)
        calls, right = self._right(place)
        if calls is None or not agreed(calls) or any(harms(call) for call in calls):
            return f"a result, where ranks called {calls}"
        return differs(got, right, calls[0].op)

    def _right(self, place: int) -> tuple[list[Call] | None, Any]:
        """Return what all ranks call, and what this one is to get if they agree."""
        comm = self._program.actions[self._rank][place].comm
        index = self._program.index(self._rank, place)
        calls = self._program.together(comm, self._rank, index)
        if calls is None or not agreed(calls) or any(harms(call) for call in calls):
            return calls, None
        return calls, right_result(calls, self._comms[comm].rank)


def sent_call(program: Program, rank: int, place: int) -> tuple[Any, str] | None:
    """Return the array of the message that a receive is to get, or None."""
    action = program.actions[rank][place]
    number = program.mail(("recv", "irecv"), rank, place)
    members = program.members(action.comm, rank)
    source = members[action.peer]
    found = program.nth(("send", "isend"), source, action, members.index(rank), number)
    if found is None:
        return None
    call = program.actions[source][found].call
    assert call is not None
    return argument(call, action.peer, len(members)), ""


def _keywords(call: Call, comm: Communicator) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if call.op:
        found["op"] = "average" if call.wrong == "op" else call.op
    if call.op == CUSTOM and call.wrong != "op":
        found["op"] = ac.op(custom_op(raises=call.wrong == "custom op"))
    if call.root >= 0:
        found["root"] = comm.size if call.wrong == "root" else call.root
    if call.wrong == "out shape":
        found["out"] = np.empty((7, 7, 7), DTYPES[call.dtype])
    if call.wrong == "out frozen":
        zero = np.zeros((), DTYPES[call.dtype])
        rows = [comm.size] * (call.operation in ("allgather", "alltoall"))
        found["out"] = np.broadcast_to(zero, (*rows, *call.shape))
    return found
