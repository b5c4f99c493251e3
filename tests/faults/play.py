"""One rank's part in a program: do what it says, and compare what comes back with NumPy's result."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

import arraycomm as ac
from arraycomm import Communicator, Request
from arraycomm.testing._oracle import BOOL, expected, same_result
from tests.faults.programs import DTYPES, Action, Call, Program

Array = np.ndarray[Any, Any]

ON_PURPOSE: Final = "on purpose"
ARGUMENT_ERRORS: Final = (TypeError, ValueError, BufferError, OverflowError)
SIGNALS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT)
STATUSES: Final = (0, 3, None, "status")
DEATHS: Final = (0, 1, 7)


class OnPurposeError(Exception):
    """What a rank raises that fails by itself."""


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
    player = _Player(world, program, rest)
    for place, action in enumerate(program.actions[world.rank]):
        if action.kind == "leave":
            return
        trace.begin(place)
        try:
            wrong = player.act(place, action)
        except ac.PeerError as error:
            if not error.in_step:
                trace.end("error", error)
                raise
            trace.end("peer", error)
        except ARGUMENT_ERRORS as error:
            trace.end("argument", error)
        except BaseException as error:
            trace.end("error", error)
            raise
        else:
            trace.end("wrong" if wrong else "ok", text=wrong)
    trace.finish()


class _Player:
    def __init__(self, world: Communicator, program: Program, rest: Callable[[], None]) -> None:
        self._rank = world.rank
        self._program = program
        self._rest = rest
        self._comms: dict[int, Communicator] = {0: world}
        self._requests: dict[int, Request] = {}

    def act(self, place: int, action: Action) -> str:
        """Do an action; return what is wrong with its result, or an empty string."""
        if action.kind in ("call", "wait", "recv"):
            return self._judged(place, self._result(action))
        if action.kind == "make":
            return self._make(action)
        if action.kind in ("start", "isend", "irecv", "send"):
            started = self._begin(action)
            if action.request >= 0:
                self._requests[action.request] = started
            return ""
        self._end(action)
        return ""

    def _end(self, action: Action) -> None:
        if action.kind == "slow":
            time.sleep(0.02)
        elif action.kind == "sleep":
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
        if call.operation == "dup":
            made: Communicator | None = comm.dup(**({"foo": 1} if call.wrong else {}))
        else:
            made = comm.split("a" if call.wrong else action.color)  # type: ignore[arg-type]
        members = self._program.members(action.makes, self._rank)
        if made is not None:
            self._comms[action.makes] = made
        got = (-1, 0) if made is None else (made.rank, made.size)
        right = (members.index(self._rank), len(members)) if members else (-1, 0)
        return "" if got == right else f"rank and size {got}, not {right}"

    def _result(self, action: Action) -> Any:
        return (
            self._requests[action.request].wait() if action.kind == "wait" else self._begin(action)
        )

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
            arguments.append(_counts(call, comm.rank, comm.size))
        keywords: dict[str, Any] = {}
        if call.op:
            keywords["op"] = "average" if call.wrong == "op" else call.op
        if call.root >= 0:
            keywords["root"] = comm.size if call.wrong == "root" else call.root
        if call.wrong == "out shape":
            keywords["out"] = np.empty((7, 7, 7), DTYPES[call.dtype])
        if call.wrong == "out frozen":
            keywords["out"] = np.broadcast_to(
                np.zeros((), DTYPES[call.dtype]), _out_shape(call, comm)
            )
        if call.operation == "allreduce_tree":
            return ac.allreduce_tree(*arguments, comm=comm, **keywords)
        name = f"i{call.operation}" if action.kind == "start" else call.operation
        return getattr(comm, name)(*arguments, **keywords)

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
        comm = self._comms[action.comm]
        index = self._program.index(self._rank, place)
        calls = self._program.together(action.comm, self._rank, index)
        if calls is None or not agreed(calls) or any(call.wrong for call in calls):
            return f"a result, where ranks called {calls}"
        return differs(got, right_result(calls, comm.rank), calls[0].op)


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


# What ranks pass, and what they get


def argument(call: Call, rank: int, size: int) -> Any:
    """Return the array, tree or object that a rank passes."""
    if call.wrong == "list":
        return [1.0, 2.0]
    if call.wrong == "object dtype":
        return np.array([{}, {}])
    if call.wrong == "unpicklable":
        return threading.Lock()
    if call.operation.endswith("_object"):
        return {"number": call.number, "rank": rank, "text": "x" * (call.number * 7919 % 40_000)}
    if call.operation in ("bcast", "scatter") and call.root != rank:
        return None
    if not call.dtype:
        return None
    rows: tuple[int, ...] = ()
    if call.operation in ("scatter", "alltoall", "reduce_scatter"):
        rows = (size,)
    elif call.operation in ("allgatherv", "gatherv"):
        rows = ((call.number + rank) % 4,)
    elif call.operation == "alltoallv":
        rows = (sum(_counts(call, rank, size)),)
    x = values(call, (*rows, *call.shape), rank)
    if call.operation == "allreduce_tree":
        return {"a": x, "b": [x[..., None], None]}
    return x


def values(call: Call, shape: tuple[int, ...], rank: int) -> Array:
    """Return values that no other rank and no other call passes."""
    dtype = DTYPES[call.dtype]
    random = np.random.default_rng((call.number, rank, dtype.itemsize))
    raw = random.integers(0, 2 if dtype in BOOL else 120, shape)
    if dtype.kind == "c":
        return np.asarray(raw + 1j * random.integers(0, 120, shape), dtype)
    scale = 1 if dtype.kind in "biu" else 0.37
    return np.asarray(raw * scale).astype(dtype)


def _counts(call: Call, rank: int, size: int) -> list[int]:
    return [(call.number + rank + 2 * other) % 3 for other in range(size)]


def _out_shape(call: Call, comm: Communicator) -> tuple[int, ...]:
    return (comm.size, *call.shape) if call.operation in ("allgather", "alltoall") else call.shape


def signature(call: Call, rank: int) -> tuple[Any, Any]:
    """Return what a call shows the others: its head, and its array or None where it cannot know."""
    head = (call.operation, call.op, call.root)
    unknown = call.operation in ("bcast", "scatter") and rank != call.root
    return head, None if unknown or not call.dtype else (call.dtype, call.shape)


def agreed(calls: list[Call]) -> bool:
    """Tell whether the calls of all ranks are parts of one; those that raise are left aside."""
    shown = [signature(call, rank) for rank, call in enumerate(calls) if not call.wrong]
    arrays = {array for _, array in shown if array is not None}
    return len({head for head, _ in shown}) <= 1 and len(arrays) <= 1


def right_result(calls: list[Call], rank: int) -> Any:
    """Return what a rank gets from a call to which the ranks pass these."""
    call, size = calls[rank], len(calls)
    if call.operation == "barrier":
        return None
    if call.root >= 0:
        if call.operation == "reduce" and rank != call.root:
            return None
        if call.operation.startswith("gather") and rank != call.root:
            return None
        if call.operation in ("bcast", "scatter", "bcast_object"):
            sent = argument(calls[call.root], call.root, size)
            return sent[rank] if call.operation == "scatter" else sent
    passed = [argument(other, number, size) for number, other in enumerate(calls)]
    return _RESULTS[call.operation](passed, rank, call, calls)


def _block(x: Array, counts: list[int], rank: int) -> Array:
    start = sum(counts[:rank])
    return x[start : start + counts[rank]]


_RESULTS: Final[dict[str, Callable[[list[Any], int, Call, list[Call]], Any]]] = {
    "allreduce": lambda xs, rank, call, calls: expected(xs, call.op),
    "reduce": lambda xs, rank, call, calls: expected(xs, call.op),
    "scan": lambda xs, rank, call, calls: expected(xs[: rank + 1], call.op),
    "exscan": lambda xs, rank, call, calls: expected(xs[:rank], call.op) if rank else None,
    "reduce_scatter": lambda xs, rank, call, calls: expected([x[rank] for x in xs], call.op),
    "allreduce_tree": lambda xs, rank, call, calls: {
        "a": expected([x["a"] for x in xs], call.op),
        "b": [expected([x["b"][0] for x in xs], call.op), None],
    },
    "allgather": lambda xs, rank, call, calls: np.stack(xs),
    "allgatherv": lambda xs, rank, call, calls: np.concatenate(xs),
    "gather": lambda xs, rank, call, calls: np.stack(xs),
    "gatherv": lambda xs, rank, call, calls: np.concatenate(xs),
    "alltoall": lambda xs, rank, call, calls: np.stack([x[rank] for x in xs]),
    "alltoallv": lambda xs, rank, call, calls: np.concatenate(
        [
            _block(x, _counts(other, source, len(xs)), rank)
            for source, (x, other) in enumerate(zip(xs, calls, strict=True))
        ]
    ),
    "allgather_object": lambda xs, rank, call, calls: xs,
    "gather_object": lambda xs, rank, call, calls: xs,
}


def differs(got: Any, right: Any, op: str = "") -> str:
    """Say in what a result differs from the right one, or return an empty string."""
    if isinstance(right, dict) and "a" in right:
        pairs = [(got["a"], right["a"]), (got["b"][0], right["b"][0])]
        return next((said for pair in pairs if (said := differs(*pair, op))), "")
    if not isinstance(right, np.ndarray | np.generic):
        return "" if got == right else f"{got!r:.200}, not {right!r:.200}"
    found = np.asarray(got)
    if same_result(found, np.asarray(right), op):
        return ""
    return f"{found.dtype} {found.shape} {found!r:.200}, not {right.dtype} {right.shape} {right!r:.200}"
