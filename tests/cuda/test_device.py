"""A device's memory over a stand-in for CuPy, whose streams work late: what is asked, and in which order.

What CuPy and CUDA do, no test here knows.
"""

from __future__ import annotations

import copy
import ctypes
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._cuda import device
from arraycomm._cuda.device import CudaMemory
from arraycomm._errors import TransportError

NOT_READY, ILLEGAL_ADDRESS = 600, 700


class FakeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class FakeCuda:
    """Streams that do nothing before somebody waits for them; device memory is the host's."""

    def __init__(self) -> None:
        self.devices: int | FakeError = 2
        self.device, self.current = 0, 0
        # Work, and events by their numbers.
        self.queues: dict[int, list[Callable[[], Any] | int]] = defaultdict(list)
        self.pinned: set[int] = set()
        self.memory: list[np.ndarray] = []
        self.allocated_on: list[tuple[int, int]] = []
        self.events = 0
        self.error = 0
        self.waits: list[tuple[int, int]] = []
        self.launched: list[tuple[Any, ...]] = []

    def cupy(self) -> Any:
        runtime = SimpleNamespace(
            CUDARuntimeError=FakeError,
            is_hip=False,
            getDeviceCount=self.count,
            memcpyAsync=self.memcpy,
            pointerGetAttributes=lambda at: SimpleNamespace(type=int(at in self.pinned)),
            eventRecord=self.record,
            eventQuery=self.query,
            eventSynchronize=self.synchronize,
            streamWaitEvent=lambda stream, event: self.waits.append((stream, event)),
        )
        return SimpleNamespace(
            cuda=SimpleNamespace(
                runtime=runtime,
                driver=SimpleNamespace(CUDADriverError=FakeError),
                Device=lambda number: self.entered("device", number),
                Stream=FakeStreams(self),
                Event=self.event,
                alloc=self.alloc,
            )
        )

    @contextmanager
    def entered(self, what: str, value: int) -> Iterator[None]:
        before = getattr(self, what)
        setattr(self, what, value)
        try:
            yield
        finally:
            setattr(self, what, before)

    def count(self) -> int:
        if isinstance(self.devices, FakeError):
            raise self.devices
        return self.devices

    def alloc(self, nbytes: int) -> Any:
        self.allocated_on.append((self.device, self.current))
        self.memory.append(np.full(nbytes + 1, 255, np.uint8))
        return SimpleNamespace(ptr=self.memory[-1].ctypes.data)

    def memcpy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert (kind, self.device) == (4, 1)
        if self.error:
            raise FakeError(self.error)
        known = [m.ctypes.data <= source < m.ctypes.data + len(m) for m in self.memory]
        if not any(known) and source not in self.pinned:
            # Ordinary memory of the host is copied aside at once.
            aside = ctypes.create_string_buffer(ctypes.string_at(source, nbytes), nbytes)
            self.queues[stream].append(lambda: ctypes.memmove(target, aside, nbytes))
        else:
            self.queues[stream].append(lambda: ctypes.memmove(target, source, nbytes))

    def event(self, *, disable_timing: bool) -> Any:
        assert disable_timing
        self.events += 1
        return SimpleNamespace(ptr=self.events)

    def record(self, event: int, stream: int) -> None:
        assert self.device == 1
        self.queues[stream].append(event)

    def query(self, event: int) -> int:
        waiting = any(event in queue for queue in self.queues.values())
        return self.error or (NOT_READY if waiting else 0)

    def synchronize(self, event: int) -> None:
        """Work the event's stream off up to the event."""
        (queue,) = (queue for queue in self.queues.values() if event in queue)
        while (step := queue.pop(0)) != event:
            if callable(step):
                step()


class FakeStreams:
    """CuPy's class of streams."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def __call__(self, *, non_blocking: bool) -> Any:
        assert non_blocking
        assert self.cuda.device == 1
        return SimpleNamespace(ptr=4000 + len(self.cuda.queues))

    def from_external(self, foreign: Any) -> Any:
        version, stream = foreign.__cuda_stream__()
        assert version == 0
        return self.cuda.entered("current", stream)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    found = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", found.cupy())
    return found


@pytest.fixture
def memory(cuda: FakeCuda) -> CudaMemory:
    found = CudaMemory(1)
    found.stream = 50
    return found


def values(device_buffer: DeviceBuffer) -> list[int]:
    return list(ctypes.string_at(device_buffer.address, device_buffer.nbytes))


def test_memory_is_of_the_device_and_in_the_order_of_the_stream(
    cuda: FakeCuda, memory: CudaMemory
) -> None:
    found = memory.allocate(100)
    assert (found.size, found.dtype, found.memory) == (100, np.dtype(np.uint8), memory)
    assert found.owner is not None
    memory.at(60).allocate(1)
    assert cuda.allocated_on == [(1, 50), (1, 60)]
    assert (cuda.device, cuda.current) == (0, 0)


def test_older_cupy_has_no_streams_from_outside(
    cuda: FakeCuda, memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeStreams, "from_external")
    sys.modules["cupy"].cuda.ExternalStream = lambda at, number: cuda.entered("current", at)
    memory.allocate(1)
    assert cuda.allocated_on == [(1, 50)]


def test_a_copy_takes_its_place_on_the_stream(cuda: FakeCuda, memory: CudaMemory) -> None:
    a, b = memory.allocate(3), memory.allocate(3)
    ctypes.memmove(a.address, b"abc", 3)
    b[...] = a
    assert values(b) == [255] * 3
    assert [len(queue) for queue in cuda.queues.values()] == [1]
    mark = memory.record()
    assert not mark.done()
    cuda.synchronize(cuda.events)
    assert mark.done()
    assert values(b) == list(b"abc")


def test_upload_is_done_with_the_array(cuda: FakeCuda, memory: CudaMemory) -> None:
    for pinned in (False, True):
        array = np.arange(5, dtype=np.int32)
        if pinned:
            cuda.pinned.add(array.ctypes.data)
        device_buffer = memory.upload(array)
        array[...] = -1
        memory.download(device_buffer, into := np.empty(5, np.int32))
        assert into.tolist() == [0, 1, 2, 3, 4]
        assert device_buffer.dtype == np.int32


def test_upload_of_ordinary_memory_does_not_wait(cuda: FakeCuda, memory: CudaMemory) -> None:
    memory.upload(np.arange(5))
    assert cuda.events == 0


def test_download_waits_for_what_is_on_the_stream_before_it(
    cuda: FakeCuda, memory: CudaMemory
) -> None:
    a, b = memory.upload(np.arange(4)), memory.allocate(32).view(np.int64)
    b[...] = a
    memory.download(b, into := np.zeros(4, np.int64))
    assert into.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="fit"):
        memory.download(b, np.zeros(3, np.int64))


def test_what_is_empty_is_not_copied(cuda: FakeCuda, memory: CudaMemory) -> None:
    device_buffer = memory.upload(np.empty(0, np.float32))
    memory.download(device_buffer, np.empty(0, np.float32))
    memory.fold("sum", device_buffer.dtype, [device_buffer], device_buffer)
    memory.prefixes("sum", device_buffer.dtype, [device_buffer], [device_buffer])
    memory.gather_pieces([(None, 0, 0)], device_buffer)


def test_an_error_of_the_device_is_not_taken_for_work_that_never_ends(
    cuda: FakeCuda, memory: CudaMemory
) -> None:
    mark = memory.record()
    cuda.error = ILLEGAL_ADDRESS
    with pytest.raises(TransportError, match="CUDA reported: cudaError 700"):
        mark.done()


def test_errors_of_calls_are_raised_as_ours(cuda: FakeCuda, memory: CudaMemory) -> None:
    a, b = memory.allocate(1), memory.allocate(1)
    cuda.error = ILLEGAL_ADDRESS
    with pytest.raises(TransportError, match="CUDA reported: cudaError 700"):
        b[...] = a
    assert cuda.device == 0


def test_another_stream_waits_and_not_the_host(cuda: FakeCuda, memory: CudaMemory) -> None:
    mark = memory.record()
    mark.wait_on(70)
    assert cuda.waits == [(70, cuda.events)]
    assert not mark.done()


def test_kernels_get_addresses_and_the_stream(cuda: FakeCuda, memory: CudaMemory) -> None:
    class Kernels:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *arguments: cuda.launched.append((name, *arguments, cuda.device))

    memory.__dict__["_kernels"] = Kernels()
    a, b = (memory.allocate(8).view(np.float32) for _ in range(2))
    memory.fold("max", a.dtype, [a, b], b)
    memory.prefixes("sum", a.dtype, [a, b], [b, a])
    memory.gather_pieces([(a, 0, 8), (None, 8, 3), (b, 11, 0)], b)
    assert cuda.launched == [
        ("fold", "max", a.dtype, [a.address, b.address], b.address, 2, 50, 1),
        ("prefixes", "sum", a.dtype, [a.address, b.address], [b.address, a.address], 2, 50, 1),
        ("gather_pieces", [(a.address, 0, 8), (0, 8, 3)], b.address, 50, 1),
    ]


def test_a_copy_of_the_memory_has_a_stream_of_its_own(cuda: FakeCuda, memory: CudaMemory) -> None:
    cuda.queues[1] = []
    other = copy.copy(memory)
    assert (other.device, other.own_stream != memory.own_stream) == (1, True)
    assert (memory.stream, other.stream) == (50, 0)


# What there is -------------------------------------------------------------------------------------


def test_a_machine_with_devices_misses_nothing(cuda: FakeCuda) -> None:
    assert device.missing() is None
    assert device.count() == 2


@pytest.mark.parametrize(
    ("devices", "words"),
    [(FakeError(35), "driver"), (FakeError(100), "CUDA_VISIBLE_DEVICES"), (0, "no CUDA device")],
)
def test_what_is_missing_is_said(cuda: FakeCuda, devices: Any, words: str) -> None:
    cuda.devices = devices
    assert words in (device.missing() or "")


def test_a_cupy_for_rocm_is_not_enough(cuda: FakeCuda) -> None:
    sys.modules["cupy"].cuda.runtime.is_hip = True
    assert "ROCm" in (device.missing() or "")


def test_a_missing_cupy_is_said_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "pip install cupy-cuda12x" in (device.missing() or "")


@pytest.mark.parametrize(
    ("local_rank", "wanted", "chosen"),
    [(0, None, 0), (1, None, 1), (2, None, 0), (5, "cuda", 1), (0, "cuda:1", 1), (7, "cuda:0", 0)],
)
def test_ranks_take_the_devices_in_turn(
    cuda: FakeCuda, local_rank: int, wanted: str | None, chosen: int
) -> None:
    assert device.choose_device(local_rank, wanted) == chosen


@pytest.mark.parametrize("wanted", ["cuda:2", "cuda:-1", "cuda:", "cpu", "CUDA", "cuda:1x"])
def test_a_device_that_is_not_there_is_refused(cuda: FakeCuda, wanted: str) -> None:
    with pytest.raises(ValueError, match="device"):
        device.choose_device(0, wanted)


def test_who_shares_a_device_is_named() -> None:
    assert device.shared_devices(["a", "b", "c"]) == ""
    text = device.shared_devices(["a", "b", "a", "c", "b", "a"])
    assert text == "ranks 0, 2, 5 and ranks 1, 4 share a CUDA device"
