"""Pinned memory between device and host, with host memory for both and copies that come late."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory
from arraycomm._arrays.pinned import Staging, staged_chunks, unstaged_chunks
from tests.support.frameworks import pointer

Array = np.ndarray[Any, Any]


class LateMark:
    """Comes when the host waits for it, and then runs what was put on the stream before."""

    def __init__(self, memory: LateMemory, place: int) -> None:
        self.memory, self.place = memory, place

    def done(self) -> bool:
        return self.memory.ran >= self.place

    def wait_on(self, stream: int) -> None:
        raise AssertionError("nothing here waits on a stream")

    def come(self) -> None:
        self.memory.run_until(self.place)


class LateMemory(DeviceMemory):
    """A device of host memory that does nothing before it must."""

    device = 0

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.streams: list[int] = []
        self.ran = 0

    def run_until(self, place: int) -> None:
        while self.ran < place:
            self.work[self.ran]()
            self.ran += 1

    def copy(self, target: DeviceBuffer, source: DeviceBuffer) -> None:
        assert target.nbytes == source.nbytes
        places = target.address, source.address, target.nbytes
        self.work.append(lambda: ctypes.memmove(*places))
        self.streams.append(self.stream)

    def record(self) -> LateMark:
        return LateMark(self, len(self.work))

    def _is_not_called(self, *_: Any) -> Any:
        raise NotImplementedError

    allocate = upload = download = fold = prefixes = _is_not_called
    gather_pieces = words = write = spoil = _is_not_called


class Pins:
    """Counts what was pinned, and knows each block by its address."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> Array:
        self.sizes.append(nbytes)
        return np.zeros(nbytes, np.uint8)


def on_device(array: Array, memory: DeviceMemory) -> DeviceBuffer:
    return DeviceBuffer(pointer(array), array.size, array.dtype, array, memory)


class TestPool:
    def test_a_block_comes_back_when_its_array_is_deleted(self) -> None:
        pins = Pins()
        staging = Staging(pins)
        array = staging.empty(5000)
        address = pointer(array)
        del array
        assert pointer(staging.empty(8000)) == address
        assert pins.sizes == [8192]

    def test_a_slice_keeps_the_block(self) -> None:
        staging = Staging(Pins())
        array = staging.empty(5000)
        part = array[10:20].view(np.int16).reshape(5)[1:]
        address = pointer(array)
        del array
        other = staging.empty(5000)
        assert pointer(other) != address
        del part
        assert pointer(staging.empty(5000)) == address

    def test_a_block_waits_for_its_mark(self) -> None:
        staging, memory = Staging(Pins()), LateMemory()
        array = staging.empty(5000)
        address = pointer(array)
        memory.copy(*[on_device(array, memory)] * 2)
        mark = memory.record()
        staging.until(array[3:], mark)
        del array
        assert pointer(staging.empty(5000)) != address
        mark.come()
        taken = [pointer(a) for a in [staging.empty(5000), staging.empty(5000)]]
        assert address in taken

    def test_what_is_kept_is_bounded(self) -> None:
        pins = Pins()
        staging = Staging(pins, kept=16384)
        arrays = [staging.empty(8192) for _ in range(4)]
        del arrays
        again = [staging.empty(8192) for _ in range(4)]
        assert len(again) == 4
        assert len(pins.sizes) == 6  # two were kept, and two pinned anew

    def test_a_block_may_come_back_while_another_is_taken(self) -> None:
        """Garbage may be collected anywhere, so also inside of `empty`, which holds a lock."""
        staging = Staging(lambda n: (gc.collect(0), np.zeros(n, np.uint8))[1])
        for _ in range(3):
            cycle: list[Any] = [staging.empty(5000)]
            cycle.append(cycle)
            del cycle

        class Collects(LateMark):
            def done(self) -> bool:
                gc.collect(0)
                return True

        memory = LateMemory()
        array = staging.empty(5000)
        staging.until(array, Collects(memory, 0))
        del array
        cycle = [staging.empty(5000)]
        cycle.append(cycle)
        del cycle
        assert staging.empty(5000).size == 5000


def lifted(device_buffer: DeviceBuffer, chunk_bytes: int, staging: Staging) -> Iterator[Array]:
    """Each chunk, once its mark has come."""
    for mark, chunk in staged_chunks(device_buffer, chunk_bytes, staging):
        mark.come()
        yield chunk


def filled(device_buffer: DeviceBuffer, chunk_bytes: int, staging: Staging) -> Iterator[Array]:
    """Each chunk, once it may be filled."""
    for mark, chunk in unstaged_chunks(device_buffer, chunk_bytes, staging):
        if mark is not None:
            mark.come()
        yield chunk


@pytest.mark.parametrize("chunks", [lifted, filled])
def test_a_caller_that_stops_leaves_no_buffer_to_the_device(chunks: Any) -> None:
    pins, memory = Pins(), LateMemory()
    staging = Staging(pins)
    source = np.zeros(50_000, np.uint8)
    steps = chunks(on_device(source, memory), 4096, staging)
    for _ in range(3):
        next(steps)
    steps.close()
    del steps
    busy = len(memory.work) - memory.ran
    assert busy
    taken = [staging.empty(4096) for _ in range(2)]
    assert len(pins.sizes) == 2 + busy  # those that the device is in were not taken
    memory.run_until(len(memory.work))
    del taken
    _ = [staging.empty(4096) for _ in range(2 + busy)]
    assert len(pins.sizes) == 2 + busy
