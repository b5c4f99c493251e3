"""Movements between devices by an MPI that takes addresses of device memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory, Event
from arraycomm._transports.base import Blocks, Bytes, DeviceLink, Handle, Transport


class GpuAwareMpiLink(DeviceLink):
    """The host transport's own movements, with arrays that only tell where device memory is.

    MPI knows nothing of streams: a movement begins once the device has come to it, and what follows
    is put on the stream after MPI has finished.
    """

    name = "mpi"
    # Enough to hide the waits in between, and as many bytes of scratch as a device can spare.
    chunk_bytes = 64 << 20

    def __init__(self, transport: Transport, memory: DeviceMemory) -> None:
        self._transport = transport
        self.memory = memory
        self.rank, self.size = transport.rank, transport.size

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        return self._after(lambda: self._transport.alltoall(_blocks(send), _blocks(recv)))

    def allgather(self, recv: Blocks) -> Handle:
        return self._after(lambda: self._transport.allgather(_blocks(recv)))

    def gather(self, send: DeviceBuffer, recv: Blocks | None, root: int) -> Handle:
        into = None if recv is None else _blocks(recv)
        return self._after(lambda: self._transport.gather(_bytes(send), into, root))

    def scatter(self, send: Blocks | None, recv: DeviceBuffer, root: int) -> Handle:
        source = None if send is None else _blocks(send)
        return self._after(lambda: self._transport.scatter(source, _bytes(recv), root))

    def bcast(self, buffer: DeviceBuffer, root: int) -> Handle:
        return self._after(lambda: self._transport.bcast(_bytes(buffer), root))

    def _after(self, begin: Callable[[], Handle]) -> Handle:
        return _Movement(self.memory.record(), begin)


class _Movement:
    """A movement that begins once the device has come to a mark."""

    def __init__(self, event: Event, begin: Callable[[], Handle]) -> None:
        self._mark = event
        self._begin = begin
        self._movement: Handle | None = None

    def done(self) -> bool:
        if self._movement is None:
            if not self._mark.done():
                return False
            self._movement = self._begin()
        return self._movement.done()


def _blocks(blocks: Blocks) -> Blocks:
    return blocks._replace(buffer=_bytes(blocks.buffer))


def _bytes(device_buffer: DeviceBuffer) -> Bytes:
    """Return an array that is at the address of a span, and that nobody here looks into."""
    if not device_buffer.nbytes:
        return np.empty(0, np.uint8)
    memory: Any = (ctypes.c_ubyte * device_buffer.nbytes).from_address(device_buffer.address)
    array: Bytes = np.frombuffer(memory, np.uint8)
    return array
