"""Messages between processes of one node: frames in a ring for each two of them.

Frames of one ring keep their order. What has come goes into a mailbox, where receives find it. A
long message is finished when its receiver says that it was taken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Final

import numpy as np

from arraycomm._transports.base import Bytes, Handle, Transport
from arraycomm._transports.mailbox import Mailbox
from arraycomm._transports.processes.rings import Ring, Transfer
from arraycomm._transports.undivided import Undivided

# A frame begins with its kind, its tag, the number of its message, and the bytes that follow.
_WORDS: Final = 4
_SHORT, _LONG, _TAKEN = range(3)
_NOTHING: Final = np.empty(0, np.uint8)


class _Frame:
    """A frame on its way out."""

    def __init__(self, ring: Ring, words: Sequence[int], body: Bytes = _NOTHING) -> None:
        head = np.array([*words, len(body)], np.int64).view(np.uint8)
        self._parts = [Transfer(ring, part, sending=True) for part in (head, body)]
        self.gone = False

    def push(self) -> bool:
        self.gone = all(part.done() for part in self._parts)
        return self.gone


class _Peer:
    """Frames to and from one other rank; what comes is handed to `deliver` and `confirm`."""

    def __init__(self, messages: Messages, rank: int, to: Ring, of: Ring) -> None:
        self._messages, self.rank, self.ring, self._of = messages, rank, to, of
        self.outgoing: deque[_Frame] = deque()
        # Long messages that no receive has taken yet, with their numbers.
        self._untaken: list[tuple[Handle, int]] = []
        self._taking = Undivided()
        self._begin()

    def _begin(self) -> None:
        self._head = np.empty(_WORDS, np.int64)
        self._coming = Transfer(self._of, self._head.view(np.uint8), sending=False)
        self._body: Bytes | None = None

    def pump(self) -> None:
        """Move frames as far as they go."""
        while self._coming.done():
            with self._taking:
                self._take()
        for message, number in [entry for entry in self._untaken if entry[0].done()]:
            # If an interrupt comes before the other, it is said twice.
            self.outgoing.append(_Frame(self.ring, (_TAKEN, 0, number)))
            self._untaken.remove((message, number))
        while self.outgoing and self.outgoing[0].push():
            self.outgoing.popleft()

    def _take(self) -> None:
        """Take what has come: the head of a frame, or its body."""
        if self._body is None:
            self._body = np.empty(self._head[-1], np.uint8)
            self._coming = Transfer(self._of, self._body, sending=False)
        else:
            self._deliver(self._body)
            self._begin()

    def _deliver(self, body: Bytes) -> None:
        kind, tag, number, _ = self._head.tolist()
        if kind == _TAKEN:
            self._messages.untaken.discard(number)
            return
        message = self._messages.arrived(self.rank, tag, body)
        if kind == _LONG:
            self._untaken.append((message, number))


class _Sending:
    """A message under way to another rank: finished when it has gone, or, if long, was taken."""

    def __init__(self, messages: Messages, frame: _Frame, number: int) -> None:
        self._messages, self._frame, self._number = messages, frame, number

    def done(self) -> bool:
        """Push the messages on; return whether this one is finished."""
        self._messages.pump()
        return self._frame.gone and self._number not in self._messages.untaken


class _Receiving:
    """A receive under way."""

    def __init__(self, messages: Messages, receive: Handle) -> None:
        self._messages, self._receive = messages, receive

    def done(self) -> bool:
        """Push the messages on; return whether this one has come."""
        self._messages.pump()
        if not self._receive.done():
            return False
        # Its sender may wait to hear of it.
        self._messages.pump()
        return True


class Messages:
    """The messages of one rank."""

    def __init__(self, rank: int, rings: dict[int, tuple[Ring, Ring]]) -> None:
        self._rank = rank
        self._mailbox = Mailbox()
        self._peers = {peer: _Peer(self, peer, *pair) for peer, pair in rings.items()}
        self._pumping = threading.Lock()
        self._numbers = count(1)
        # The numbers of the long messages of this rank that no receive has taken yet.
        self.untaken: set[int] = set()

    def send(self, buffer: Bytes, dest: int, tag: int) -> Handle:
        """Send bytes to a rank, which may be this one."""
        if dest == self._rank:
            return self._mailbox.send((dest, dest, tag), buffer)
        number, peer = next(self._numbers), self._peers[dest]
        short = len(buffer) <= Transport.copied
        if not short:
            self.untaken.add(number)
        frame = _Frame(peer.ring, (_SHORT if short else _LONG, tag, number), buffer)
        peer.outgoing.append(frame)
        self.pump()
        return _Sending(self, frame, number)

    def recv(self, buffer: Bytes, source: int, tag: int) -> Handle:
        """Receive into the first bytes of `buffer`."""
        return _Receiving(self, self._mailbox.recv((source, self._rank, tag), buffer))

    def probe(self, source: int | None, tags: range) -> tuple[int, int] | None:
        """Return source and tag of the first message that no receive is to get, or None."""
        self.pump()
        return self._mailbox.probe(source, self._rank, tags)

    def arrived(self, source: int, tag: int, body: Bytes) -> Handle:
        """Let receives find a message; the handle is done when one has taken it."""
        return self._mailbox.send((source, self._rank, tag), body)

    def pump(self) -> None:
        """Move messages as far as they go, unless another thread does."""
        # An interrupt right after an acquire() that succeeded would leave the lock held for ever.
        if not self._pumping.locked():
            with self._pumping:
                for peer in self._peers.values():
                    peer.pump()

    def close(self) -> None:
        """Release the memory of the rings; nothing is sent or received any more."""
        self._peers = {}
