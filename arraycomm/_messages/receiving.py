"""The receiving side: an envelope is read, and becomes an array or object like the one wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from arraycomm._calls.pickles import loads
from arraycomm._calls.placement import DeferredResultBuffer, Destination, HostPlacement
from arraycomm._calls.refusals import Wanted, wanted_kind, wanted_like
from arraycomm._checks import check_seconds
from arraycomm._errors import MismatchError, PeerError
from arraycomm._messages import envelopes
from arraycomm._messages.delivery import Message, nothing
from arraycomm._messages.envelopes import Pickled
from arraycomm._messages.matching import PROC_NULL, TAGS, Matcher, Status, named
from arraycomm._protocol.agreement import UndeliveredError
from arraycomm._protocol.group import Group
from arraycomm._reduce.blocks import cut
from arraycomm._transports.base import Bytes, Steps


class Receiver:
    """Receives the messages of one group; `place` returns that of the thread in its program."""

    def __init__(self, group: Group, matcher: Matcher, place: Callable[[], int]) -> None:
        self._group, self.matcher, self.place = group, matcher, place
        self._host = HostPlacement(group)

    def message(
        self,
        source: Any,
        tag: Any,
        like: Any = None,
        out: Any = None,
        status: Any = None,
        timeout: Any = None,
    ) -> Message:
        """Return a message to receive."""
        timeout = check_seconds(timeout)
        peer, tags = named(source, tag, self._group.size)
        if not (status is None or isinstance(status, Status)):
            raise TypeError(f"status must be an arraycomm.Status; got {status!r}")
        if source is PROC_NULL:
            return Message("recv", nothing(out))
        status = status or Status()
        steps = self.steps(peer, tags, like, out, status)
        return Message("recv", steps, peer, tags, -1, 0, 0, status, timeout)

    def steps(self, peer: int | None, tags: range, like: Any, out: Any, status: Status) -> Steps:
        """Receive a message from one rank, or any, with one of the tags."""
        wanted, place, envelope = _wanted_of(like, out), self.place(), envelopes.empty()
        if peer is not None and len(tags) == 1 and self.matcher.idle():
            yield self._group.transport.recv(envelope, peer, tags[0])
            status.source, status.tag = peer, tags[0]
        else:
            receive = self.matcher.recv(envelope, peer, tags)
            try:
                yield receive
            finally:
                self.matcher.drop(receive)
            status.source, status.tag = receive.source, receive.tag
        return (yield from self.arrived(envelope, place, wanted, out, status))

    def arrived(
        self, envelope: Bytes, place: int, wanted: Wanted | None, out: Any, status: Status
    ) -> Steps:
        """Read a message whose envelope has come."""
        assert status.source is not None
        counted = self._group.received[status.source, status.tag or 0]
        status.dtype, status.shape, status.nbytes = None, None, 0
        if place and (wrong := self._misplaced(place, envelope, status.source)) is not None:
            wanted = Wanted(wanted_kind(None, None, None), wrong)
        try:
            result = envelopes.short_result(envelope, out, status) if wanted is None else None
            if result is None:
                wanted = wanted or wanted_like(None, out)
                result = yield from self._take(envelope, status.source, wanted, out, status)
            return result
        finally:
            counted[0] += 1

    def _misplaced(self, place: int, envelope: Bytes, source: int) -> MismatchError | None:
        """Return what is raised if the sender is at another place of its program."""
        theirs = envelopes.place_of(envelope)
        if theirs in (0, place):
            return None
        return MismatchError(
            f"sendrecv: ranks must send and receive at the same place of their programs; rank "
            f"{self._group.rank} receives in call {place} of its program what rank {source} sends "
            f"in call {theirs}"
        )

    def _take(
        self, envelope: Bytes, source: int, wanted: Wanted, out: Any, status: Status
    ) -> Steps:
        """Read an envelope, and receive what follows it."""
        transport, (kind, wrong, pickled) = self._group.transport, wanted
        found = envelopes.read(envelope, source, TAGS)
        if isinstance(found, str):
            raise UndeliveredError(wrong or _sender_raised(source, found))
        envelopes.note(status, found.dtype, found.shape)
        if found.pickled is not pickled:
            what, by = ("an object", "recv_object") if found.pickled else ("an array", "recv")
            wrong = wrong or TypeError(f"recv: rank {source} has sent {what}; receive it by {by}")
        to = Destination(kind, None if wrong else out)
        target = DeferredResultBuffer(self._host, to, found.shape, found.dtype)
        data = target.flat.view(np.uint8)
        if found.elements is not None:
            data[...] = found.elements
        else:
            tag = TAGS + found.pieces
            self._group.watchdog.check_sender(source, len(data))
            yield from [transport.recv(piece, source, tag) for piece in cut(data)]
            self._group.watchdog.check_sender(source, len(data))
        if wrong is not None:
            raise UndeliveredError(wrong)
        try:
            return loads(source, target.deliver()) if pickled else target.deliver()
        except UndeliveredError:
            raise
        except Exception as error:
            raise UndeliveredError(error) from error


def _wanted_of(like: Any, out: Any) -> Wanted | None:
    """Return `wanted_like`; None for NumPy arrays, which can be checked later."""
    if isinstance(like, Pickled):
        return Wanted(wanted_kind(None, None, None), None, pickled=True)
    plain = like is None and (out is None or type(out) is np.ndarray)
    return None if plain else wanted_like(like, out)


def _sender_raised(source: int, traceback: str) -> PeerError:
    error = PeerError(
        f"recv: rank {source} raised instead of sending; its traceback:\n{traceback}",
        rank=source,
        traceback=traceback,
    )
    error.in_step = True
    return error
