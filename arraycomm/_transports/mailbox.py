"""Messages inside one process: the receiver copies them from the sender's memory."""

from __future__ import annotations

import threading
from collections import deque
from itertools import count
from typing import TypeVar

import numpy as np

from arraycomm._errors import TransportError
from arraycomm._transports.base import Bytes, Handle, Transport

T = TypeVar("T")
# Sender, receiver and tag of a message.
Key = tuple[int, int, int]


class Mailbox:
    """Messages under way; those of one key arrive in the order of their sending."""

    def __init__(self) -> None:
        self._messages: dict[Key, deque[_Message]] = {}
        self._receives: dict[Key, deque[_Receive]] = {}
        self._numbers = count()
        self._lock = threading.Lock()

    def send(self, key: Key, buffer: Bytes) -> Handle:
        """Send bytes; a short message is finished at once, a long one when it has been received."""
        with self._lock:
            message = _Message(buffer, next(self._numbers))
            _append(self._messages, key, message)
        return message

    def recv(self, key: Key, buffer: Bytes) -> Handle:
        """Receive into the first bytes of `buffer`."""
        receive = _Receive(self, key, buffer)
        with self._lock:
            _append(self._receives, key, receive)
        return receive

    def probe(self, source: int | None, dest: int, tags: range) -> tuple[int, int] | None:
        """Return source and tag of the first message to `dest` without a receive, or None."""
        with self._lock:
            found = [
                (messages[waiting].number, key)
                for key, messages in self._messages.items()
                if key[1] == dest and source in (None, key[0]) and key[2] in tags
                if len(messages) > (waiting := len(self._receives.get(key, ())))
            ]
        if not found:
            return None
        _, (sender, _, tag) = min(found)
        return sender, tag

    def collect(self, key: Key, receive: _Receive) -> None:
        """Give the first message of a key to its first receive, if that is this one."""
        if key not in self._messages:
            return
        with self._lock:
            # Another thread may have taken the last message, for a receive before this one.
            if key not in self._messages or self._receives[key][0] is not receive:
                return
            # An interrupt comes behind a call, of which there is none from here on.
            messages, receives = self._messages[key], self._receives[key]
            receive.message = messages[0]
            del messages[0], receives[0]
            if not messages:
                del self._messages[key]
            if not receives:
                del self._receives[key]


def copy(into: Bytes, source: Bytes) -> None:
    """Copy what another rank sends, which has to be of the size that this one waits for."""
    if len(into) != len(source):
        raise TransportError(f"a rank sent {len(source)} bytes to one that waits for {len(into)}")
    np.copyto(into, source)


def _append(queues: dict[Key, deque[T]], key: Key, last: T) -> None:
    """Put something at the end of a queue, which is never empty: also if an interrupt comes."""
    if key in queues:
        queues[key].append(last)
    else:
        queues[key] = deque((last,))


class _Message:
    """A message: a copy if it is short, otherwise the sender's own memory until it is received."""

    def __init__(self, buffer: Bytes, number: int) -> None:
        # Messages are numbered in the order of their sending.
        self.number = number
        self.taken = len(buffer) <= Transport.copied
        self.buffer: Bytes = buffer.copy() if self.taken else buffer

    def done(self) -> bool:
        return self.taken


class _Receive:
    """A receive under way."""

    def __init__(self, mailbox: Mailbox, key: Key, buffer: Bytes) -> None:
        self._mailbox, self._key, self._buffer = mailbox, key, buffer
        self.message: _Message | None = None
        self._done = False

    def done(self) -> bool:
        if self._done:
            return True
        if self.message is None:
            self._mailbox.collect(self._key, self)
            if self.message is None:
                return False
        copy(self._buffer[: len(self.message.buffer)], self.message.buffer)
        # If an interrupt comes before, this is done again: the sender still waits.
        self.message.taken = self._done = True
        self.message = None
        return True
