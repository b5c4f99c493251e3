"""Whether the MPI that was loaded takes addresses of device memory, and movements by such an MPI.

The MPI standard has no query for this; Open MPI and MPICH have `MPIX_Query_cuda_support`. A trial
cannot answer it: an MPI without GPU support takes the address for the host's, and crashes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Self

import numpy as np

from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory, Event
from arraycomm._cuda.links.link import DeviceLink
from arraycomm._transports.base import Blocks, Bytes, Handle, Transport

VARIABLE: Final = "ARRAYCOMM_GPU_AWARE_MPI"
_VALUES: Final = {"1": True, "true": True, "0": False, "false": False}


def gpu_aware() -> bool:
    """Return whether device memory may be handed to MPI.

    `ARRAYCOMM_GPU_AWARE_MPI` decides if it is set. Otherwise the library is asked, which is only
    possible between `MPI_Init` and `MPI_Finalize`; before and after, the answer is no.

    Raises
    ------
    ValueError
        The variable is neither 0 or 1 nor true or false.
    """
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value and value not in _VALUES:
        raise ValueError(
            f"init: {VARIABLE} must be 0 or 1, or true or false; got {os.environ[VARIABLE]!r}"
        )
    if value:
        return _VALUES[value]
    from mpi4py import MPI

    # MPICH ends a process that asks too early.
    return MPI.Is_initialized() and not MPI.Is_finalized() and _asked(MPI.__file__)


@cache
def _asked(library: str) -> bool:
    """Ask the MPI library that mpi4py's extension module has loaded; False if it has no answer."""
    try:
        query = ctypes.CDLL(library).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return False
    query.argtypes = ()
    query.restype = ctypes.c_int
    return bool(query())


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
