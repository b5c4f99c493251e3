"""Pinned host memory between a device and MPI: kept for the next call, and filled while MPI sends.

Pinning costs far more than a small copy, and a copy from or to pinned memory goes on by itself while
the host does other things. Both are made use of here, and both need care for the same reason: the
device may still be at work in memory that Python has let go of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from threading import Lock
from typing import Any, Final

import numpy as np

from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory, Event
from arraycomm._arrays.dlpack import array_at

Array = np.ndarray[Any, Any]

# Bytes that are kept at most while nobody uses them; what is pinned is lost to the rest of the system.
KEPT: Final = 1 << 28
_SMALLEST: Final = 1 << 12
_BYTE: Final = np.dtype(np.uint8)


class Staging:
    """Blocks of pinned memory, lent out as arrays that come back by themselves.

    Parameters
    ----------
    pin : callable
        Returns new pinned memory of so many bytes, as an array of uint8.
    kept : int
        How many bytes are kept for later use; more of them are unpinned.
    """

    def __init__(self, pin: Callable[[int], Array], kept: int = KEPT) -> None:
        self._pin = pin
        self._limit = kept
        self._kept = 0
        self._free: dict[int, list[Array]] = {}
        self._lock = Lock()
        # Filled where an array is deleted, which may be anywhere, also under the lock: no more is
        # done there than to append.
        self._back: deque[tuple[Array, Event | None]] = deque()

    def empty(self, nbytes: int) -> Array:
        """Return so many bytes of pinned memory, of which nothing is set.

        It is free for others once the array and all that is sliced from it are deleted, and the
        device has passed what `until` was told.
        """
        if not nbytes:
            return np.empty(0, _BYTE)
        length = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            self._take_back()
            blocks = self._free.get(length)
            block = blocks.pop() if blocks else None
            self._kept -= 0 if block is None else length
        if block is None:
            block = self._pin(length)
        address = block.__array_interface__["data"][0]
        return array_at(address, (nbytes,), None, _BYTE, False, _Loan(block, self._back), "staging")

    def until(self, array: Array, event: Event) -> None:
        """Keep the memory of an array of `empty` back until the device has come to `mark`.

        Only the last mark counts: marks of one array are of one stream, where they come in order.
        """
        if array.size:
            _loan_of(array).event = event

    def _take_back(self) -> None:
        for _ in range(len(self._back)):
            block, event = self._back.popleft()
            if event is not None and not event.done():
                self._back.append((block, event))
            elif self._kept + block.size <= self._limit:
                self._free.setdefault(block.size, []).append(block)
                self._kept += block.size


class _Loan:
    """Gives a block back when nothing refers to it any more."""

    __slots__ = ("_back", "_block", "event")

    def __init__(self, block: Array, back: deque[tuple[Array, Event | None]]) -> None:
        self._block = block
        self._back = back
        self.event: Event | None = None

    def __del__(self) -> None:
        self._back.append((self._block, self.event))


def _loan_of(array: Any) -> _Loan:
    """Return the loan behind an array of `Staging.empty`."""
    while isinstance(array, np.ndarray):
        array = array.base
    loan: _Loan = array.owner
    return loan


@cache
def pinned() -> Staging:
    """Return this process's own staging memory."""
    return Staging(_pin)


def _pin(nbytes: int) -> Array:
    """Pin memory outside of CuPy's pool, which keeps all that it ever had."""
    from cupy.cuda import PinnedMemory, PinnedMemoryPointer, runtime

    space = PinnedMemory(nbytes, runtime.hostAllocPortable)
    return np.frombuffer(PinnedMemoryPointer(space, 0), _BYTE, nbytes)


def staged_chunks(
    device_buffer: DeviceBuffer, chunk_bytes: int, staging: Staging
) -> Iterator[tuple[Event, Array]]:
    """Yield the bytes of a span as pinned memory, in chunks; the next one is copied meanwhile.

    Each chunk comes with a mark, from which on it is there; it is good until the next one is asked
    for. The memory's stream is that of the first step, and may change between steps.

    Parameters
    ----------
    span : Span
        What to read.
    chunk_bytes : int
        The size of all chunks but the last.
    staging : Staging
        Where the two buffers come from.
    """
    chunks, buffers = _halves(device_buffer, chunk_bytes, staging)
    copy = Copy(device_buffer.memory, staging)
    marks = [copy.out(chunks[0], buffers[0])] if chunks else []
    for number, chunk in enumerate(chunks):
        if number + 1 < len(chunks):
            marks.append(copy.out(chunks[number + 1], buffers[(number + 1) % 2]))
        yield marks[number], buffers[number % 2][: chunk.size]


def unstaged_chunks(
    device_buffer: DeviceBuffer, chunk_bytes: int, staging: Staging
) -> Iterator[tuple[Event | None, Array]]:
    """Yield pinned memory to be filled with the bytes of a span, in chunks, as `staged_chunks` does.

    A chunk may be filled from its mark on, where it has one, and must be full when the next one is
    asked for. It is copied while that is being filled; after the last one, the span is complete in
    the order of the stream.
    """
    chunks, buffers = _halves(device_buffer, chunk_bytes, staging)
    copy = Copy(device_buffer.memory, staging)
    marks: list[Event] = []
    for number, chunk in enumerate(chunks):
        buffer = buffers[number % 2]
        yield marks[number - 2] if number >= 2 else None, buffer[: chunk.size]
        marks.append(copy.back(chunk, buffer))


def _halves(
    device_buffer: DeviceBuffer, chunk_bytes: int, staging: Staging
) -> tuple[list[DeviceBuffer], list[Array]]:
    """Return the chunks of a span, and memory for two of them."""
    flat = device_buffer.view(np.uint8)
    chunks = [flat[start : start + chunk_bytes] for start in range(0, flat.size, chunk_bytes)]
    return chunks, [staging.empty(chunk.size) for chunk in chunks[:2]]


class Copy:
    """Copies between a device and pinned memory, which the pool gets back only after them.

    They keep to the stream that is the memory's now.
    """

    def __init__(self, memory: DeviceMemory, staging: Staging) -> None:
        self._memory = memory
        self._stream = memory.stream
        self._staging = staging

    def out(self, chunk: DeviceBuffer, buffer: Array) -> Event:
        """Copy bytes from the device to the beginning of a buffer."""
        return self._copy(self._as_span(chunk, buffer), chunk, buffer)

    def back(self, chunk: DeviceBuffer, buffer: Array) -> Event:
        """Copy as many bytes from the beginning of a buffer to the device."""
        return self._copy(chunk, self._as_span(chunk, buffer), buffer)

    def _as_span(self, chunk: DeviceBuffer, buffer: Array) -> DeviceBuffer:
        """Show pinned memory as the device's, whose copies take both."""
        address = int(buffer.__array_interface__["data"][0])
        return DeviceBuffer(address, chunk.size, _BYTE, buffer, self._memory)

    def _copy(self, target: DeviceBuffer, source: DeviceBuffer, buffer: Array) -> Event:
        here = self._memory.stream
        try:
            self._memory.at(self._stream).copy(target, source)
            event = self._memory.record()
        finally:
            self._memory.at(here)
        self._staging.until(buffer, event)
        return event
