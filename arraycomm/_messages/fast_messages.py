"""The fast paths of messages (see `_prepared/fast_paths.py`) of few elements, in NumPy arrays.

A send is prepared for its rank, tag, dtype and shape; a receive for its rank and tag, and for an
array like the one that came last. They send and take the envelopes of full calls, whatever the
other rank does. If anything is unusual, or late, the rest of a full call goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any, Final, Protocol

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._calls.statistics import Statistics
from arraycomm._callsite import call_site
from arraycomm._messages import envelopes
from arraycomm._messages.matching import Matcher, Status
from arraycomm._native import compiled
from arraycomm._prepared.fast_paths import FastPath
from arraycomm._protocol.agreement import UndeliveredError
from arraycomm._protocol.group import Group
from arraycomm._protocol.waits.deadlock import MANY, Wait
from arraycomm._protocol.waits.waiting import give_up_core
from arraycomm._transports.base import Bytes, Handle, Repeated, Steps

# How often a message is looked for in vain, for each poll of a wait that keeps its core, before the
# engine waits for it.
_LOOKS: Final = 8
# Bytes from which on memory that another core has read is written past the caches: to write it
# there takes longer than all the rest of a call.
_LONG: Final = 4 << 10


class MessageWait:
    """What a thread waits for that makes a call without a request, for errors."""

    __slots__ = ("doing", "nbytes", "peer", "tag")

    def __init__(self, doing: str, peer: int, tag: int, nbytes: int = 0) -> None:
        self.doing, self.peer, self.tag, self.nbytes = doing, peer, tag, nbytes

    def __str__(self) -> str:
        return f"{self.doing} rank {self.peer} with tag {self.tag}"

    def told(self, group: Group) -> Wait:
        """Return what is told of this wait."""
        sends = self.doing == "send to"
        unknown = sends and (self.nbytes <= group.transport.copied or self.tag >= MANY)
        # A request under way may get the message that is counted next.
        unknown = unknown or bool(group.engine.messages)
        [count] = (group.sent if sends else group.received)[self.peer, self.tag]
        counted = () if unknown else (int(sends), self.tag, count)
        return Wait(lambda: [self.peer], str(self), call_site(), None, counted=counted)


class Rest(Protocol):
    """Goes on with calls whose messages are under way."""

    def go_on(self, steps: Steps, wait: MessageWait, operation: str) -> Any:
        """Take the rest of a call's steps in this thread."""

    def request(self, steps: Steps, wait: MessageWait, operation: str) -> Any:
        """Return a request of steps that go on beside the caller."""

    def finished(self, result: Any) -> Any:
        """Return the request of a message that is complete."""

    def arrived(self, envelope: Bytes, place: int, wanted: None, out: Any, status: Status) -> Steps:
        """Read a message whose envelope has come."""


def beside(sending: Iterable[Handle], receiving: Steps, wait: MessageWait, dest: int) -> Steps:
    """Wait for what is received, then for what is sent; only then raise an error of the first."""
    result, undelivered = None, list[UndeliveredError]()
    try:
        result = yield from receiving
    except UndeliveredError as error:
        undelivered.append(error)
    wait.doing, wait.peer = "send to", dest
    yield from sending
    if undelivered:
        raise undelivered.pop()
    return result


class _FastMessage(FastPath):
    """A message that can be begun again and again, as soon as the one before is finished."""

    _message: Repeated

    def __init__(self, group: Group, rest: Rest) -> None:
        self._group, self._rest = group, rest
        self._turn, self._queue = group.engine.turn, group.engine.queue
        self._spins = group.transport.spins
        self._looks = max(_LOOKS * self._spins, 1)
        # Whether its memory is in use.
        self.busy = False

    def free(self) -> None:
        self._message.free(finished=not self.busy)

    def _is_soon_done(self) -> bool:
        """Look a few times, and let others have the core in between."""
        done, spins = self._message.done, self._spins
        for look in range(self._looks):
            if done():
                return True
            if look >= spins:
                give_up_core()
        return False


class FastSend(_FastMessage):
    """`send` and `isend` of arrays like `example`, in envelopes with this head; see `FastPath`."""

    def __init__(
        self,
        group: Group,
        statistics: Statistics,
        rest: Rest,
        dest: int,
        tag: int,
        head: Bytes,
        example: Array,
    ) -> None:
        super().__init__(group, rest)
        self._dest, self._tag, self._nbytes = dest, tag, example.nbytes
        self._sent, self._numbers = group.sent[dest, tag], statistics.numbers("send")
        envelope = np.empty(len(head) + example.nbytes, np.uint8)
        envelope[: len(head)] = head
        self._elements = np.ndarray(example.shape, example.dtype, envelope, len(head))
        self._message = group.transport.repeated_send(envelope, dest, tag)

    def __call__(self, x: Array) -> Any:
        with self._turn:
            # Behind requests of collectives the full call finds its own way.
            if self._queue or self.busy or self._group.closed is not None:
                return NotImplemented
            started = perf_counter()
            try:
                if not self.begin(x) and not self.ended():
                    self._rest.go_on(self.steps(), self.wait(), "send")
            finally:
                self._numbers[3] += perf_counter() - started

    def start(self, x: Array) -> Any:
        with self._turn:
            if self.busy or self._group.closed is not None:
                return NotImplemented
            if self.begin(x):
                return self._rest.finished(None)
            return self._rest.request(self.steps(), self.wait(), "send")

    def begin(self, x: Array) -> bool:
        """Begin to send; return whether that is all."""
        if self._nbytes < _LONG or compiled is None or not x.flags.c_contiguous:
            self._elements[...] = x
        else:
            compiled.copy(self._elements, x)
        numbers, self.busy = self._numbers, True
        numbers[0] += 1
        numbers[1] += self._nbytes
        numbers[2] += not x.flags.c_contiguous
        self._group.unmatched += 1
        self._sent[0] += 1
        self.busy = not self._message.begin()
        return not self.busy

    def ended(self) -> bool:
        """Return whether the message has been sent in a moment."""
        self.busy = not self._is_soon_done()
        return not self.busy

    def steps(self) -> Steps:
        """Wait until the message has been sent."""
        yield self._message
        self.busy = False

    def wait(self) -> MessageWait:
        """Return what is waited for."""
        return MessageWait("send to", self._dest, self._tag, self._nbytes)


class FastReceive(_FastMessage):
    """`recv` and `irecv` from one rank with one tag, at one `place`; see `FastPath`."""

    def __init__(
        self,
        group: Group,
        statistics: Statistics,
        rest: Rest,
        matcher: Matcher,
        source: int,
        tag: int,
        place: int,
    ) -> None:
        super().__init__(group, rest)
        self._matcher, self._source, self._tag, self._place = matcher, source, tag, place
        self._received, self._numbers = group.received[source, tag], statistics.numbers("recv")
        # Whatever comes has room here.
        self._room = envelopes.empty()
        self._message = group.transport.repeated_recv(self._room, source, tag)
        # The head of what has come, and that of arrays like the last one, whose elements come
        # there: as words, which are compared faster than bytes.
        self._head = self._room[: envelopes.HEAD].data.cast("q")
        self._known: memoryview | None = None
        self._elements = np.empty(0)

    def __call__(self, out: Any, status: Status | None) -> Any:
        with self._turn:
            if self._queue or not self._may_begin():
                return NotImplemented
            started = perf_counter()
            try:
                come = self._begin() or self._is_soon_done()
                taken = self._take(out, status) if come else None
                if taken is None:
                    return self._rest.go_on(self.steps(out, status), self.wait(), "recv")
                return taken
            finally:
                self._numbers[3] += perf_counter() - started

    def exchange(self, send: FastSend, x: Array, out: Any, status: Status | None) -> Any:
        """Receive beside what is sent to another rank; see `FastPath`."""
        with self._turn:
            if self._queue or send.busy or not self._may_begin():
                return NotImplemented
            started = perf_counter()
            try:
                come, sent = self._begin(), send.begin(x)
                come = come or self._is_soon_done()
                taken = self._take(out, status) if come else None
                if taken is None:
                    sending, wait = send.wait(), self.wait()
                    wait.nbytes = sending.nbytes
                    steps = beside(send.steps(), self.steps(out, status), wait, sending.peer)
                    return self._rest.go_on(steps, wait, "recv")
                if not sent and not send.ended():
                    self._rest.go_on(send.steps(), send.wait(), "recv")
                return taken
            finally:
                self._numbers[3] += perf_counter() - started

    def start(self, out: Any, status: Status | None) -> Any:
        with self._turn:
            if not self._may_begin():
                return NotImplemented
            if self._begin() and (taken := self._take(out, status)) is not None:
                return self._rest.finished(taken)
            return self._rest.request(self.steps(out, status), self.wait(), "recv")

    def _may_begin(self) -> bool:
        """Return False if a receive cannot begin here, or others come before."""
        return not self.busy and self._group.closed is None and self._matcher.idle()

    def _begin(self) -> bool:
        """Begin to receive; return whether the message is there."""
        self.busy = True
        self._numbers[0] += 1
        self._group.unmatched -= 1
        return self._message.begin()

    def steps(self, out: Any, status: Status | None) -> Steps:
        """Wait until the message has come, and receive what else belongs to it."""
        yield self._message
        try:
            taken = self._take(out, status)
            if taken is None:
                status = status or Status()
                status.source, status.tag = self._source, self._tag
                taken = yield from self._rest.arrived(self._room, self._place, None, out, status)
                self._know()
            return taken
        finally:
            self.busy = False

    def wait(self) -> MessageWait:
        """Return what is waited for."""
        return MessageWait("recv from", self._source, self._tag)

    def _take(self, out: Any, status: Status | None) -> Array | None:
        """Return the array that has come; None if it is not like the one before."""
        if self._head != self._known:
            return None
        taken = envelopes.taken(self._elements, out, status)
        if taken is not None:
            if status is not None:
                status.source, status.tag = self._source, self._tag
            self._received[0] += 1
            self.busy = False
        return taken

    def _know(self) -> None:
        """Expect arrays like the one that has come."""
        head, elements = envelopes.short_elements(self._room)
        if elements is not None:
            self._known, self._elements = memoryview(head).cast("q"), elements
