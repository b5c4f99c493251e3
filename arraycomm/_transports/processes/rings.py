"""Bytes between processes of one node: a ring for each two of them, in memory both have mapped."""

from __future__ import annotations

from typing import Final

from arraycomm._transports.base import Bytes
from arraycomm._transports.notes import fence

# Two words of 8 bytes, how much was ever written and read, each in a line of its own.
_HEAD: Final = 128
_READ: Final = 8


class Ring:
    """Bytes from one process to another; one writes, the other reads."""

    def __init__(self, memory: Bytes) -> None:
        self._words = memory[:_HEAD].data.cast("q")
        self._data = memory[_HEAD:]
        # So that the other can read the first part while this one writes the next.
        self._most = max(len(self._data) // 4, 1)

    @staticmethod
    def nbytes(capacity: int) -> int:
        """Return the bytes of zeroed memory that a ring takes, which holds this many at once."""
        return _HEAD + capacity

    def write(self, source: Bytes) -> int:
        """Write as many bytes as there is room for; return how many."""
        written, read = self._words[0], self._words[_READ]
        fence()
        count = min(len(self._data) - (written - read), len(source), self._most)
        start = written % len(self._data)
        first = min(count, len(self._data) - start)
        self._data[start : start + first] = source[:first]
        self._data[: count - first] = source[first:count]
        fence()
        self._words[0] = written + count
        return count

    def read(self, into: Bytes) -> int:
        """Read as many bytes as there are, at most those that are wanted; return how many."""
        written, read = self._words[0], self._words[_READ]
        fence()
        count = min(written - read, len(into), self._most)
        start = read % len(self._data)
        first = min(count, len(self._data) - start)
        into[:first] = self._data[start : start + first]
        into[first:count] = self._data[: count - first]
        fence()
        self._words[_READ] = read + count
        return count


class Transfer:
    """Bytes that a ring takes or gives, as far as they have not gone yet."""

    def __init__(self, ring: Ring, part: Bytes, *, sending: bool) -> None:
        self._move = ring.write if sending else ring.read
        self._left = part

    def done(self) -> bool:
        """Move what can move; return whether all has gone."""
        while len(self._left):
            count = self._move(self._left)
            if not count:
                return False
            self._left = self._left[count:]
        return True
