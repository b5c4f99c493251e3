"""The fast path of `sendrecv` of small NumPy arrays: dtype, shape, ranks and tag were seen before.

It does what a call does otherwise, with its envelopes prepared: the same bytes come from a rank
that sends a like array from the same place. If anything else comes, or nothing yet, it hands over.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._calls.fast_paths import FastPath
from arraycomm._calls.statistics import Statistics
from arraycomm._dtypes import DType
from arraycomm._messages import envelopes
from arraycomm._messages.matching import Status
from arraycomm._protocol.group import Group
from arraycomm._transports.base import Bytes, Handle, Steps

# How often a message is looked for before others are let run.
_POLLS: Final = 8


class Key(NamedTuple):
    """What calls have in common that one fast path makes; `place` is that in a program, or 0."""

    dest: int
    source: int
    tag: int
    place: int
    dtype: DType
    shape: tuple[int, ...]


class Rest(Protocol):
    """Goes on with a call whose messages are under way."""

    def go_on(self, sent: Handle, receiving: Steps, dest: int, source: int, tag: int) -> Any:
        """Wait in this thread for a message that is received, and one that is sent."""

    def arrived(self, envelope: Bytes, place: int, wanted: None, out: Any, status: Status) -> Steps:
        """Read a message whose envelope has come."""


class FastExchange(FastPath):
    """`sendrecv` of one key; see `FastPath`."""

    def __init__(self, group: Group, statistics: Statistics, rest: Rest, key: Key) -> None:
        self._group, self._rest, self._key = group, rest, key
        self._sent = group.sent[key.dest, key.tag]
        self._received = group.received[key.source, key.tag]
        self._sends, self._receives = statistics.numbers("send"), statistics.numbers("recv")
        head = envelopes.short_head(key.dtype, key.shape, key.place)
        assert head is not None
        self._head = head.tobytes()
        nbytes = len(head) + int(np.prod(key.shape, dtype=np.int64)) * key.dtype.itemsize
        self._envelope = np.empty(nbytes, np.uint8)
        self._envelope[: len(head)] = head
        # Whatever comes has room here.
        self._room = np.empty(envelopes.NBYTES, np.uint8)
        self._head_come = self._room.data[: len(head)]
        self._pair = group.transport.pair(self._envelope, key.dest, self._room, key.source, key.tag)
        self._own, self._come = (
            np.ndarray(key.shape, key.dtype, memory, len(head))
            for memory in (self._envelope, self._room)
        )

    def __call__(self, x: Array, out: Any, status: Any) -> Any:
        if out is not None and not self._fits(out):
            return NotImplemented
        turn = self._group.engine.turn
        if not turn.acquire(False):
            return NotImplemented
        try:
            group = self._group
            if group.closed is not None or not group.engine.idle:
                return NotImplemented
            return self._exchange(x, out, status)
        finally:
            turn.release()

    def _fits(self, out: Any) -> bool:
        return (
            type(out) is np.ndarray
            and out.dtype == self._key.dtype
            and out.shape == self._key.shape
            and out.flags.carray
        )

    def _exchange(self, x: Array, out: Any, status: Any) -> Any:
        started = perf_counter()
        self._own[...] = x
        self._sends[0] += 1
        self._sends[1] += x.nbytes
        self._sends[2] += not x.flags.c_contiguous
        self._receives[0] += 1
        try:
            result = self._make(out, status)
        finally:
            self._receives[3] += perf_counter() - started
        return result

    def _make(self, out: Any, status: Any) -> Any:
        pair = self._pair
        self._sent[0] += 1
        try:
            pair.begin()
            finished = _found(pair.received) and self._head_come == self._head and _found(pair.sent)
        except BaseException as error:
            self._group.close(error)
            self._group.unfinished = True
            raise
        if finished:
            return self._taken(out, status)
        key, receiving = self._key, self._receive(pair.received, out, status)
        return self._rest.go_on(pair.sent, receiving, key.dest, key.source, key.tag)

    def free(self) -> None:
        """Give back what the transport keeps for it; no call is made afterwards."""
        self._pair.free()

    def _receive(self, received: Handle, out: Any, status: Any) -> Steps:
        yield received
        if self._head_come == self._head:
            return self._taken(out, status)
        status = status or Status()
        status.source, status.tag = self._key.source, self._key.tag
        return (yield from self._rest.arrived(self._room, self._key.place, None, out, status))

    def _taken(self, out: Any, status: Any) -> Array:
        """Return the elements that have come."""
        self._received[0] += 1
        if status is not None:
            status.source, status.tag = self._key.source, self._key.tag
            envelopes.note(status, self._key.dtype, self._key.shape)
        if out is None:
            return self._come.copy()
        out[...] = self._come
        taken: Array = out
        return taken


def _found(message: Handle) -> bool:
    polls = _POLLS
    while not message.done():
        polls -= 1
        if not polls:
            return False
    return True
