"""The fast paths of messages (see `_prepared/fast_paths.py`) of few elements, in NumPy arrays.

A send is prepared for its rank, tag, dtype and shape; a receive for its rank and tag, and for an
array like the one that came last. They send and take the envelopes of full calls, whatever the
other rank does. If anything is unusual, or late, the rest of a full call goes on from there.
"""

from __future__ import annotations

import math
from time import perf_counter
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import DType
from arraycomm._messages import envelopes
from arraycomm._messages.delivery import Delivery, Message
from arraycomm._messages.matching import Status
from arraycomm._messages.receiving import Receiver
from arraycomm._native import compiled
from arraycomm._prepared.fast_paths import FastPath, FastPaths
from arraycomm._protocol.waits.waiting import give_up_core
from arraycomm._transports.base import Bytes, Repeated, Steps

# How often a message is looked for in vain, for each poll of a wait that keeps its core, before the
# engine waits for it.
_LOOKS: Final = 8
# Bytes from which on memory that another core has read is written past the caches: to write it
# there takes longer than all the rest of a call.
_LONG: Final = 4 << 10


# A class of fast paths, the other rank, the tag, the place in a program, and what arrays are like.
Key = tuple[Any, ...]


class FastMessages:
    """The fast paths of one group's messages."""

    def __init__(self, paths: FastPaths, delivery: Delivery, receiver: Receiver) -> None:
        self._paths, self._delivery, self._receiver = paths, delivery, receiver
        self._place = receiver.place

    def find_send(self, x: Any, dest: Any, tag: Any) -> tuple[Key | None, FastPath | None]:
        """Return the key of a send, and its fast path, if there are any."""
        if type(x) is not np.ndarray or type(dest) is not int or type(tag) is not int:
            return None, None
        key = (FastSend, dest, tag, self._place(), x.dtype, x.shape)
        return key, self._paths.find(key)

    def find_recv(
        self, source: Any, tag: Any, like: Any, out: Any, status: Any
    ) -> tuple[Key | None, FastPath | None]:
        """Return the key of a receive, and its fast path, if there are any."""
        plain = (
            type(source) is int
            and type(tag) is int
            and (like is None or (type(like) is np.ndarray and not like.dtype.hasobject))
            and (out is None or type(out) is np.ndarray)
            and (status is None or type(status) is Status)
        )
        if not plain:
            return None, None
        key = (FastReceive, source, tag, self._place())
        return key, self._paths.find(key)

    def keep(self, key: Key | None) -> None:
        """Keep the fast path of a call that has been made in full, if it has one."""
        if key is not None and key[1] != self._delivery.group.rank:
            self._paths.keep_second(key, lambda: self._made(*key))

    def _made(self, kind: Any, peer: int, tag: int, place: int, *like: Any) -> FastPath:
        """Return a fast path; one that does nothing if messages like these have none."""
        delivery = self._delivery
        if kind is FastReceive:
            return FastReceive(delivery, self._receiver, peer, tag, place)
        head = envelopes.short_head(*like, place)
        return FastPath() if head is None else FastSend(delivery, peer, tag, head, *like)


class _FastMessage(FastPath):
    """A message that can be begun again and again, as soon as the one before is finished."""

    _message: Repeated

    def __init__(self, delivery: Delivery, peer: int, tag: int) -> None:
        self._delivery, self._group = delivery, (group := delivery.group)
        self._peer, self._tags = peer, range(tag, tag + 1)
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
    """`send` and `isend` of arrays of this form, in envelopes with this head; see `FastPath`."""

    def __init__(
        self,
        delivery: Delivery,
        dest: int,
        tag: int,
        head: Bytes,
        dtype: DType,
        shape: tuple[int, ...],
    ) -> None:
        super().__init__(delivery, dest, tag)
        self._sent, self._numbers = self._group.sent[dest, tag], delivery.statistics.numbers("send")
        self._nbytes = math.prod(shape) * dtype.itemsize
        envelope = np.empty(len(head) + self._nbytes, np.uint8)
        envelope[: len(head)] = head
        self._elements = np.ndarray(shape, dtype, envelope, len(head))
        self._message = self._group.transport.repeated_send(envelope, dest, tag)

    def __call__(self, x: Array) -> Any:
        with self._turn:
            # Behind requests of collectives the full call finds its own way.
            if self._queue or self.busy or self._group.closed is not None:
                return NotImplemented
            started = perf_counter()
            try:
                if not self.begin(x) and not self.ended():
                    self._delivery.drive(self.message())
            finally:
                self._numbers[3] += perf_counter() - started

    def start(self, x: Array) -> Any:
        with self._turn:
            if self.busy or self._group.closed is not None:
                return NotImplemented
            if self.begin(x):
                return self._delivery.finished(None)
            return self._delivery.request(self.message(), looked=True)

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

    def message(self) -> Message:
        """Return what is left of the message."""
        return Message("send", self.steps(), self._peer, self._tags, 1, self._nbytes)


class FastReceive(_FastMessage):
    """`recv` and `irecv` from one rank with one tag, at one `place`; see `FastPath`."""

    def __init__(
        self, delivery: Delivery, receiver: Receiver, source: int, tag: int, place: int
    ) -> None:
        super().__init__(delivery, source, tag)
        self._receiver, self._matcher, self._place = receiver, receiver.matcher, place
        self._received = self._group.received[source, tag]
        self._numbers = delivery.statistics.numbers("recv")
        # Whatever comes has room here.
        self._room = envelopes.empty()
        self._message = self._group.transport.repeated_recv(self._room, source, tag)
        # The head of what has come, and that of arrays like the last one, whose elements come
        # there: as words, which are compared faster than bytes.
        self._head = self._room[: envelopes.HEAD].data.cast("q")
        self._known: memoryview | None = None
        self._elements = np.empty(0)

    def __call__(
        self, out: Any, status: Status | None, send: FastSend | None = None, x: Any = None
    ) -> Any:
        """Receive, beside `x` if that is sent to another rank; see `FastPath`."""
        with self._turn:
            if self._queue or not self._may_begin() or (send is not None and send.busy):
                return NotImplemented
            started = perf_counter()
            try:
                come = self._begin()
                sent = send is None or send.begin(x)
                taken = self._take(out, status) if come or self._is_soon_done() else None
                if taken is None:
                    sending = () if send is None else (send.message(),)
                    return self._delivery.drive(*sending, self.message(out, status))
                if not sent and send is not None and not send.ended():
                    self._delivery.drive(send.message())
                return taken
            finally:
                self._numbers[3] += perf_counter() - started

    def start(self, out: Any, status: Status | None) -> Any:
        with self._turn:
            if not self._may_begin():
                return NotImplemented
            if self._begin() and (taken := self._take(out, status)) is not None:
                return self._delivery.finished(taken)
            return self._delivery.request(self.message(out, status), looked=True)

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
                status.source, status.tag = self._peer, self._tags[0]
                taken = yield from self._receiver.arrived(
                    self._room, self._place, None, out, status
                )
                self._know()
            return taken
        finally:
            self.busy = False

    def message(self, out: Any, status: Status | None) -> Message:
        """Return what is left of the message."""
        return Message("recv", self.steps(out, status), self._peer, self._tags, -1)

    def _take(self, out: Any, status: Status | None) -> Array | None:
        """Return the array that has come; None if it is not like the one before."""
        if self._head != self._known:
            return None
        taken = envelopes.taken(self._elements, out, status)
        if taken is not None:
            if status is not None:
                status.source, status.tag = self._peer, self._tags[0]
            self._received[0] += 1
            self.busy = False
        return taken

    def _know(self) -> None:
        """Expect arrays like the one that has come."""
        head, elements = envelopes.short_elements(self._room)
        if elements is not None:
            self._known, self._elements = memoryview(head).cast("q"), elements
