"""Streams, events, memory and the runtime, as `cupy.cuda` has them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from cupy import _driver
from cupy._machine import NOT_READY, POISON, CudaError, machine

from arraycomm._arrays.dlpack import array_at

nvrtc = _driver.nvrtc
function = SimpleNamespace(Module=_driver.Module)
driver = SimpleNamespace(CUDADriverError=CudaError)


def _attributes(address: int) -> Any:
    block = machine.pool.find(address)
    if block is not None:
        return SimpleNamespace(type=runtime.memoryTypeDevice, device=block.stream.device)
    kind = runtime.memoryTypeHost if machine.is_pinned(address) else 0
    return SimpleNamespace(type=kind, device=-2)


runtime = SimpleNamespace(
    CUDARuntimeError=CudaError,
    is_hip=False,
    hostAllocPortable=1,
    memoryTypeHost=1,
    memoryTypeDevice=2,
    memoryTypeManaged=3,
    getDeviceCount=machine.count,
    getDevice=lambda: machine.here.device,
    setDevice=machine.use,
    driverGetVersion=lambda: 13000,
    runtimeGetVersion=lambda: 13000,
    memGetInfo=lambda: ((64 << 30) - machine.pool.total, 64 << 30),
    deviceSynchronize=machine.synchronize,
    streamSynchronize=machine.wait,
    streamQuery=lambda stream: NOT_READY if machine.stream(stream).busy else 0,
    eventRecord=machine.record,
    eventQuery=machine.query,
    eventSynchronize=machine.synchronize_event,
    streamWaitEvent=machine.wait_event,
    memcpyAsync=machine.copy,
    pointerGetAttributes=_attributes,
)
pinned_memory = SimpleNamespace(is_memory_pinned=machine.is_pinned)


class Device:
    """CuPy's: its context sets the device before, whether it was used or not."""

    compute_capability = "90"

    def __init__(self, number: int | None = None) -> None:
        self.id = machine.here.device if number is None else int(number)

    def __str__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __int__(self) -> int:
        return self.id

    def use(self) -> None:
        machine.use(self.id)

    def __enter__(self) -> Self:
        machine.here.before.append(machine.here.device)
        machine.use(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        machine.use(machine.here.before.pop())

    def synchronize(self) -> None:
        machine.synchronize()


# Streams and events ---------------------------------------------------------------------------------


class _Stream:
    def __init__(self, ptr: int, device_id: int = -1) -> None:
        self.ptr, self.device_id = ptr, device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __enter__(self) -> Self:
        here = machine.here
        here.before.append((here.device, here.current.get(here.device)))
        return self.use()

    def __exit__(self, *_: object) -> None:
        device, before = machine.here.before.pop()
        machine.here.current[device] = before

    def use(self) -> _Stream:
        machine.here.current[machine.here.device] = self
        return self

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    @property
    def done(self) -> bool:
        return not machine.stream(self.ptr).busy

    def synchronize(self) -> None:
        machine.wait(self.ptr)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        machine.record(event.ptr, self.ptr)
        return event

    def wait_event(self, event: Event) -> None:
        machine.wait_event(self.ptr, event.ptr)

    def begin_capture(self, mode: int | None = None) -> None:
        machine.stream(self.ptr).capturing = threading.get_ident()

    def end_capture(self) -> None:
        machine.stream(self.ptr).capturing = 0

    def is_capturing(self) -> bool:
        return bool(machine.stream(self.ptr).capturing)


class Stream(_Stream):
    """A stream that is destroyed when nobody refers to it."""

    null: _Stream
    ptds: _Stream

    def __init__(self, *, non_blocking: bool = False) -> None:
        super().__init__(machine.new_stream(), machine.here.device)

    def __del__(self, _close: Any = machine.close_stream) -> None:
        if "ptr" in self.__dict__:
            _close(self.ptr)

    @staticmethod
    def from_external(stream: Any) -> ExternalStream:
        version, handle = stream.__cuda_stream__()
        assert version == 0
        return ExternalStream(handle)


class ExternalStream(_Stream):
    """A stream that belongs to others."""


Stream.null, Stream.ptds = _Stream(0), _Stream(2)


def get_current_stream(device_id: int = -1) -> Any:
    here = machine.here
    return here.current.get(here.device if device_id < 0 else device_id) or Stream.null


def current_stream() -> Any:
    """Return where the work of CuPy's own operations goes now."""
    return machine.stream(get_current_stream().ptr)


class Event:
    def __init__(self, *, disable_timing: bool = False) -> None:
        self.ptr = machine.new_event()

    def __del__(self, _marks: Any = machine) -> None:
        if "ptr" in self.__dict__:
            _marks.marks.pop(self.ptr, None)

    @property
    def done(self) -> bool:
        return machine.query(self.ptr) == 0

    def record(self, stream: Any = None) -> None:
        machine.record(self.ptr, (stream or get_current_stream()).ptr)

    def synchronize(self) -> None:
        machine.synchronize_event(self.ptr)


# Memory ---------------------------------------------------------------------------------------------


class Memory:
    """Memory of the pool, which has it back when nobody refers to this."""

    def __init__(self, nbytes: int) -> None:
        self.stream = current_stream()
        self.size, self.device_id = nbytes, self.stream.device
        self._pool = machine.pool
        self._block = self._pool.take(nbytes, self.stream)
        self.ptr = self._block.start

    def __del__(self) -> None:
        if "_block" in self.__dict__:
            self._pool.give_back(self._block)


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner
        block = machine.pool.find(ptr) if device_id < 0 else None
        self.device_id = block.stream.device if block else max(device_id, 0)


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


def alloc(nbytes: int) -> MemoryPointer:
    return MemoryPointer(Memory(nbytes), 0)


class PinnedMemory:
    def __init__(self, size: int, flags: int = 0) -> None:
        self._space = np.full(size + 4096, POISON, np.uint8)
        address = self._space.__array_interface__["data"][0]
        self.ptr, self.size = address + -address % 4096, size
        self._machine = machine
        machine.pin(self.ptr, self.ptr + size)

    def __del__(self) -> None:
        if "_machine" in self.__dict__:
            self._machine.unpin(self.ptr, self._space)


def PinnedMemoryPointer(mem: PinnedMemory, offset: int) -> Any:  # noqa: N802 - CuPy's name
    """Return pinned memory as an array of bytes, which keeps it."""
    shape = (mem.size - offset,)
    return array_at(mem.ptr + offset, shape, None, np.dtype(np.uint8), False, mem, "pinned")
