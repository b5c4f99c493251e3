"""Movements between devices by an MPI that takes addresses of device memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory, Event
from arraycomm._cuda.link import DeviceLink
from arraycomm._transports.base import Blocks, Bytes, Handle, Transport


class GpuAwareMpiLink(DeviceLink):
    """The host transport's own movements, over arrays with addresses of device memory.

    MPI knows nothing of streams. So a movement begins once the device has finished the work before
    it, and later work is put on the stream once MPI has finished.
    """

    name = "mpi"
    # Enough to hide the waits between chunks, and not too much scratch memory for a device.
    chunk_bytes = 64 << 20

    def __init__(self, transport: Transport, memory: DeviceMemory) -> None:
        self._transport = transport
        self.memory = memory
        self.rank, self.size = transport.rank, transport.size

    def over(self, transport: Transport) -> Self:
        return type(self)(transport, self.memory.separate())

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
    """A movement that begins once the device has reached an event."""

    def __init__(self, event: Event, begin: Callable[[], Handle]) -> None:
        self._event = event
        self._begin = begin
        self._movement: Handle | None = None

    @property
    def local(self) -> bool:
        """Whether only this rank's own device is waited for."""
        return self._movement is None

    def done(self) -> bool:
        if self._movement is None:
            if not self._event.done():
                return False
            self._movement = self._begin()
        return self._movement.done()


def _blocks(blocks: Blocks) -> Blocks:
    return blocks._replace(buffer=_bytes(blocks.buffer))


def _bytes(device_buffer: DeviceBuffer) -> Bytes:
    """Return an array at the address of a device buffer; only MPI may access its elements."""
    if not device_buffer.nbytes:
        return np.empty(0, np.uint8)
    memory: Any = (ctypes.c_ubyte * device_buffer.nbytes).from_address(device_buffer.address)
    array: Bytes = np.frombuffer(memory, np.uint8)
    return array
