"""Which message a receive takes if it may be from any rank, or have any tag.

A receive that names both is the transport's. While one that does not is waiting, all receives begun
after it wait behind it, so that each message goes to the first receive that takes it.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass
from typing import Any, Final

from arraycomm._calls.arguments import check_rank
from arraycomm._checks import check_at_least
from arraycomm._dtypes import DType
from arraycomm._transports.base import Bytes, Handle, Transport
from arraycomm._transports.undivided import Undivided


class Wildcard(enum.Enum):
    """What stands for any rank, for any tag, or for no rank, beyond the border of a grid."""

    # No integers: `rank - 1` of rank 0 must not mean any rank.
    ANY_SOURCE = enum.auto()
    ANY_TAG = enum.auto()
    PROC_NULL = enum.auto()

    def __repr__(self) -> str:
        return f"arraycomm.{self.name}"


ANY_SOURCE: Final = Wildcard.ANY_SOURCE
ANY_TAG: Final = Wildcard.ANY_TAG
PROC_NULL: Final = Wildcard.PROC_NULL

# Tags of the user's are below this, those of further pieces from it on.
TAGS: Final = 1 << 20


@dataclass(slots=True)
class Status:
    """What a receive says of the message that it got: pass one as `status`.

    Attributes
    ----------
    source, tag : int
        The rank that sent it, and its tag; None until the message has arrived, and for one of
        PROC_NULL.
    dtype, shape : numpy.dtype, tuple of int
        The array's, as it was sent; None if the sender raised instead, and after `probe`.
    nbytes : int
        Bytes of its elements; None after `probe`, since an array says its size where it is
        received.
    """

    source: int | None = None
    tag: int | None = None
    dtype: DType | None = None
    shape: tuple[int, ...] | None = None
    nbytes: int | None = 0


def check_tag(tag: Any) -> int:
    """Return a message's tag, or raise."""
    if type(tag) is int and 0 <= tag < TAGS:
        return tag
    return check_at_least(tag, 0, "tag", TAGS - 1)


def named(source: Any, tag: Any, size: int) -> tuple[int | None, range]:
    """Return the rank and tags that a receive names; None for any rank, and for none."""
    if type(source) is int and 0 <= source < size:
        rank: int | None = source
    else:
        anyone = source is ANY_SOURCE or source is PROC_NULL
        rank = None if anyone else check_rank(source, size, "source")
    tags = range(TAGS) if tag is ANY_TAG else range(found := check_tag(tag), found + 1)
    return rank, tags


class Receive:
    """A receive under way; `source` and `tag` are its message's once it is finished.

    Before, they are what it takes: None and a range of several tags stand for any.
    """

    def __init__(self, matcher: Matcher, buffer: Bytes, source: int | None, tags: range) -> None:
        self._matcher, self._buffer = matcher, buffer
        self.source, self.tags = source, tags
        self._handle: Handle | None = None

    @property
    def tag(self) -> int:
        """The tag of the message."""
        return self.tags[0]

    @property
    def exact(self) -> bool:
        """Whether it names both rank and tag."""
        return self.source is not None and len(self.tags) == 1

    def takes(self, source: int, tag: int) -> bool:
        """Return whether a message is one that this receive may get."""
        return self.source in (None, source) and tag in self.tags

    def begin(self, transport: Transport, source: int, tag: int) -> None:
        """Receive the next message of this rank and tag."""
        self.source, self.tags = source, range(tag, tag + 1)
        self._handle = transport.recv(self._buffer, source, tag)

    def done(self) -> bool:
        if self._handle is None:
            self._matcher.match()
        return self._handle is not None and self._handle.done()


class Matcher:
    """The receives of one group that wait for their messages, in the order of their calls."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._waiting: list[Receive] = []
        self._lock, self._giving = threading.Lock(), Undivided()

    def recv(self, buffer: Bytes, source: int | None, tags: range) -> Receive:
        """Receive a message from `source`, or from any rank, with one of the tags."""
        receive = Receive(self, buffer, source, tags)
        with self._lock:
            self._waiting.append(receive)
        return receive

    def idle(self) -> bool:
        """Return whether no receive waits, behind which one must come that names both.

        That stays so until the thread whose turn it is adds one.
        """
        with self._lock:
            return not self._waiting

    def probe(self, source: int | None, tags: range) -> tuple[int, int] | None:
        """Return source and tag of a message that no receive under way takes, or None."""
        self.match()
        with self._lock:
            while found := self._transport.probe(source, tags):
                # One that has come after the receives looked for it.
                if not self._give(*found):
                    break
            return found

    def drop(self, receive: Receive) -> None:
        """Let a receive that was given up take no message any more."""
        with self._lock:
            if receive in self._waiting:
                self._waiting.remove(receive)

    def match(self) -> None:
        """Give each message that has come to the first receive that takes it."""
        with self._lock:
            # Also for a receive that was given a message, but could not begin.
            self._giving.check()
            for receive in list(self._waiting):
                while receive in self._waiting and self._match_one(receive):
                    pass
            while self._waiting and self._waiting[0].exact:
                first = self._waiting[0]
                assert first.source is not None
                self._begin(first, first.source, first.tag)

    def _match_one(self, receive: Receive) -> bool:
        """Look for a message for this receive; an earlier one may take what is found."""
        found = self._transport.probe(receive.source, receive.tags)
        return found is not None and self._give(*found)

    def _give(self, source: int, tag: int) -> bool:
        """Give a message to the first receive that takes it; return whether any does."""
        first = next((each for each in self._waiting if each.takes(source, tag)), None)
        if first is None:
            return False
        self._begin(first, source, tag)
        return True

    def _begin(self, receive: Receive, source: int, tag: int) -> None:
        """Let a receive that waits wait no more."""
        with self._giving:
            self._waiting.remove(receive)
            receive.begin(self._transport, source, tag)
