"""Messages inside one process: who receives copies them from the memory of who sends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from typing import Final, TypeVar

import numpy as np

from arraycomm._transports.base import Bytes, Handle

# Bytes up to which a message is copied when it is sent.
_COPIED: Final = 4096

T = TypeVar("T")


class Mailbox:
    """Messages under way; those of one key arrive in the order of their sending."""

    def __init__(self) -> None:
        self._letters: dict[Hashable, deque[_Letter]] = {}
        self._receipts: dict[Hashable, deque[_Receipt]] = {}
        self._lock = threading.Lock()

    def send(self, key: Hashable, buffer: Bytes) -> Handle:
        """Send bytes; finished at once where they are few, else when they have been received."""
        letter = _Letter(buffer)
        with self._lock:
            self._letters.setdefault(key, deque()).append(letter)
        return letter

    def recv(self, key: Hashable, buffer: Bytes) -> Handle:
        """Receive into the first bytes of `buffer`."""
        receipt = _Receipt(self, key, buffer)
        with self._lock:
            self._receipts.setdefault(key, deque()).append(receipt)
        return receipt

    def collect(self, key: Hashable, receipt: _Receipt) -> _Letter | None:
        """Return the first message for the first receive of its key, once there is one."""
        if key not in self._letters:
            return None
        with self._lock:
            if self._receipts[key][0] is not receipt:
                return None
            _pop(self._receipts, key)
            return _pop(self._letters, key)


class _Letter:
    """A message: a copy of a short one, the sender's own memory of a long one until it is taken."""

    def __init__(self, buffer: Bytes) -> None:
        self._taken = len(buffer) <= _COPIED
        self._buffer: Bytes = buffer.copy() if self._taken else buffer

    def take(self, into: Bytes) -> None:
        np.copyto(into[: len(self._buffer)], self._buffer)
        self._taken = True

    def done(self) -> bool:
        return self._taken


class _Receipt:
    """A receive under way."""

    def __init__(self, mailbox: Mailbox, key: Hashable, buffer: Bytes) -> None:
        self._mailbox, self._key, self._buffer = mailbox, key, buffer
        self._done = False

    def done(self) -> bool:
        if not self._done:
            letter = self._mailbox.collect(self._key, self)
            if letter is not None:
                letter.take(self._buffer)
                self._done = True
        return self._done


def _pop(queues: dict[Hashable, deque[T]], key: Hashable) -> T:
    """Take the first of a queue; forget the queue with its last."""
    first = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return first
