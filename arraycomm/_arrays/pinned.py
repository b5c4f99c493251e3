"""Pinned host memory between a device and MPI: a pool of it, and copies in chunks.

Pinning costs far more than a small copy, so blocks are kept for later calls. A copy from or to
pinned memory runs while the host does other things, so one chunk is copied while MPI sends another.
For both reasons the device may still use memory that Python has deleted: the pool waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from threading import Lock
from typing import Any, Final

import numpy as np

from arraycomm._arrays.current_device import working_on
from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory, Event
from arraycomm._arrays.dlpack import array_at

Array = np.ndarray[Any, Any]

# At most this many unused bytes are kept: other processes cannot use pinned memory.
KEPT: Final = 1 << 28
_SMALLEST: Final = 1 << 12
_BYTE: Final = np.dtype(np.uint8)


class Staging:
    """A pool of pinned memory. A block returns to it when the array over the block is deleted.

    `pin` returns new memory of this many bytes. Blocks beyond `kept` unused bytes are unpinned.
    """

    def __init__(self, pin: Callable[[int], Array], kept: int = KEPT) -> None:
        self._pin = pin
        self._limit = kept
        self._kept = 0
        self._free: dict[int, list[Array]] = {}
        self._lock = Lock()
        # Arrays may be deleted at any point, also while this thread holds the lock. So a deletion
        # only appends here.
        self._back: deque[tuple[Array, Event | None]] = deque()

    def empty(self, nbytes: int) -> Array:
        """Return this many bytes of uninitialised pinned memory.

        The memory is used again once the array and all slices of it are deleted, and the device has
        reached the event that `until` was given.
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
        return array_at(
            address, (nbytes,), None, _BYTE, False, _Lease(block, self._back), "staging"
        )

    def until(self, array: Array, event: Event) -> None:
        """Do not use the memory of an array of `empty` again before the device reaches `event`.

        Only the last event counts: all events of one array are of one stream, so they are in order.
        """
        if array.size:
            _lease_of(array).event = event

    def _take_back(self) -> None:
        for _ in range(len(self._back)):
            block, event = self._back.popleft()
            if event is not None and not event.done():
                self._back.append((block, event))
            elif self._kept + block.size <= self._limit:
                self._free.setdefault(block.size, []).append(block)
                self._kept += block.size


class _Lease:
    """Owns the block of an array of `Staging.empty`, and returns it to the pool when deleted."""

    __slots__ = ("_back", "_block", "event")

    def __init__(self, block: Array, back: deque[tuple[Array, Event | None]]) -> None:
        self._block = block
        self._back = back
        self.event: Event | None = None

    def __del__(self) -> None:
        self._back.append((self._block, self.event))


def _lease_of(array: Any) -> _Lease:
    """Return the lease of an array of `Staging.empty`."""
    while isinstance(array, np.ndarray):
        array = array.base
    lease: _Lease = array.owner
    return lease


@cache
def pinned(device: int) -> Staging:
    """Return this process's pool for copies from and to a device."""
    return Staging(partial(_pin, device))


def _pin(device: int, nbytes: int) -> Array:
    """Pin memory outside of CuPy's pool, which never frees any."""
    import cupy

    with working_on(device):
        space = cupy.cuda.PinnedMemory(nbytes, cupy.cuda.runtime.hostAllocPortable)
    return np.frombuffer(cupy.cuda.PinnedMemoryPointer(space, 0), _BYTE, nbytes)


def staged_chunks(
    device_buffer: DeviceBuffer, chunk_bytes: int, staging: Staging
) -> Iterator[tuple[Event, Array]]:
    """Yield the bytes of a device buffer in chunks of pinned memory, copying one chunk ahead.

    Each chunk comes with the event after which it is complete, and is valid until the next one is
    asked for. All copies are on the memory's stream. The memory of the two chunks is of `staging`.
    """
    chunks, buffers = _halves(device_buffer, chunk_bytes, staging)
    copy = Copy(device_buffer.memory, staging)
    events = [copy.out(chunks[0], buffers[0])] if chunks else []
    for number, chunk in enumerate(chunks):
        if number + 1 < len(chunks):
            events.append(copy.out(chunks[number + 1], buffers[(number + 1) % 2]))
        yield events[number], buffers[number % 2][: chunk.size]


def unstaged_chunks(
    device_buffer: DeviceBuffer, chunk_bytes: int, staging: Staging
) -> Iterator[tuple[Event | None, Array]]:
    """Yield chunks of pinned memory for the caller to fill with the bytes of a device buffer.

    If a chunk comes with an event, it may be filled only after that. It must be full when the next
    one is asked for, and is copied while the caller fills that one. After the last chunk, the
    device buffer is complete in the order of the stream.
    """
    chunks, buffers = _halves(device_buffer, chunk_bytes, staging)
    copy = Copy(device_buffer.memory, staging)
    events: list[Event] = []
    for number, chunk in enumerate(chunks):
        buffer = buffers[number % 2]
        yield events[number - 2] if number >= 2 else None, buffer[: chunk.size]
        events.append(copy.back(chunk, buffer))


def _halves(
    device_buffer: DeviceBuffer, chunk_bytes: int, staging: Staging
) -> tuple[list[DeviceBuffer], list[Array]]:
    """Return the chunks of a device buffer, and pinned memory for two of them."""
    flat = device_buffer.view(np.uint8)
    chunks = [flat[start : start + chunk_bytes] for start in range(0, flat.size, chunk_bytes)]
    return chunks, [staging.empty(chunk.size) for chunk in chunks[:2]]


class Copy:
    """Copies between a device and pinned memory, which the pool uses again only after them.

    All are on the memory's stream.
    """

    def __init__(self, memory: DeviceMemory, staging: Staging) -> None:
        self._memory = memory
        self._staging = staging

    def out(self, chunk: DeviceBuffer, buffer: Array) -> Event:
        """Copy bytes from the device to the beginning of a buffer."""
        return self._copy(self._as_device_buffer(chunk, buffer), chunk, buffer)

    def back(self, chunk: DeviceBuffer, buffer: Array) -> Event:
        """Copy as many bytes from the beginning of a buffer to the device."""
        return self._copy(chunk, self._as_device_buffer(chunk, buffer), buffer)

    def _as_device_buffer(self, chunk: DeviceBuffer, buffer: Array) -> DeviceBuffer:
        """Return pinned memory as a device buffer, since the device's copies take both."""
        address = int(buffer.__array_interface__["data"][0])
        return DeviceBuffer(address, chunk.size, _BYTE, buffer, self._memory)

    def _copy(self, target: DeviceBuffer, source: DeviceBuffer, buffer: Array) -> Event:
        self._memory.copy(target, source)
        event = self._memory.record()
        self._staging.until(buffer, event)
        return event
