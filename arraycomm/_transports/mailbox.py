"""Messages inside one process: the receiver copies them from the sender's memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from typing import Final, TypeVar

import numpy as np

from arraycomm._errors import TransportError
from arraycomm._transports.base import Bytes, Handle

# Messages of at most this many bytes are copied when they are sent.
_COPIED: Final = 4096

T = TypeVar("T")


class Mailbox:
    """Messages under way; those of one key arrive in the order of their sending."""

    def __init__(self) -> None:
        self._messages: dict[Hashable, deque[_Message]] = {}
        self._receives: dict[Hashable, deque[_Receive]] = {}
        self._lock = threading.Lock()

    def send(self, key: Hashable, buffer: Bytes) -> Handle:
        """Send bytes; a short message is finished at once, a long one when it has been received."""
        message = _Message(buffer)
        with self._lock:
            self._messages.setdefault(key, deque()).append(message)
        return message

    def recv(self, key: Hashable, buffer: Bytes) -> Handle:
        """Receive into the first bytes of `buffer`."""
        receive = _Receive(self, key, buffer)
        with self._lock:
            self._receives.setdefault(key, deque()).append(receive)
        return receive

    def collect(self, key: Hashable, receive: _Receive) -> _Message | None:
        """Return the first message of a key for its first receive; None if there is none yet."""
        if key not in self._messages:
            return None
        with self._lock:
            if self._receives[key][0] is not receive:
                return None
            _pop(self._receives, key)
            return _pop(self._messages, key)


def copy(into: Bytes, source: Bytes) -> None:
    """Copy what another rank sends, which has to be of the size that this one waits for."""
    if len(into) != len(source):
        raise TransportError(f"a rank sent {len(source)} bytes to one that waits for {len(into)}")
    np.copyto(into, source)


class _Message:
    """A message: a copy if it is short, otherwise the sender's own memory until it is received."""

    def __init__(self, buffer: Bytes) -> None:
        self._taken = len(buffer) <= _COPIED
        self._buffer: Bytes = buffer.copy() if self._taken else buffer

    def take(self, into: Bytes) -> None:
        copy(into[: len(self._buffer)], self._buffer)
        self._taken = True

    def done(self) -> bool:
        return self._taken


class _Receive:
    """A receive under way."""

    def __init__(self, mailbox: Mailbox, key: Hashable, buffer: Bytes) -> None:
        self._mailbox, self._key, self._buffer = mailbox, key, buffer
        self._done = False

    def done(self) -> bool:
        if not self._done:
            message = self._mailbox.collect(self._key, self)
            if message is not None:
                message.take(self._buffer)
                self._done = True
        return self._done


def _pop(queues: dict[Hashable, deque[T]], key: Hashable) -> T:
    """Take the first element of a queue, and delete the queue if it is then empty."""
    first = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return first
