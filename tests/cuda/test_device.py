"""A device's memory over a stand-in for CuPy, whose streams work late: what is asked, and in which order.

What CuPy and CUDA do, no test here knows.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arraycomm._arrays import current_device, pinned
from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._cuda import device, devices
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
        self.modes: list[int] = []
        # The devices on which this process has a context.
        self.contexts = {0}
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
            getDevice=lambda: self.device,
            setDevice=self.use,
            hostAllocPortable=1,
            memcpyAsync=self.memcpy,
            eventRecord=self.record,
            eventSynchronize=self.synchronize,
            streamWaitEvent=lambda stream, event: self.waits.append((stream, event)),
        )
        return SimpleNamespace(
            cuda=SimpleNamespace(
                runtime=runtime,
                driver=SimpleNamespace(CUDADriverError=FakeError),
                Device=lambda number: FakeDevice(self, number),
                PinnedMemory=lambda nbytes, flags: self.use(self.device) or np.empty(nbytes, "u1"),
                PinnedMemoryPointer=lambda space, offset: space,
                Stream=FakeStreams(self),
                Event=self.event,
                alloc=self.alloc,
            )
        )

    def use(self, device: int) -> None:
        """As `cudaSetDevice` does since CUDA 12."""
        self.device = device
        self.contexts.add(device)

    def driver(self) -> Any:
        def get(number: Any, device: int) -> int:
            number._obj.value = device
            return 0

        def state(number: Any, _flags: Any, active: Any) -> int:
            active._obj.value = number.value in self.contexts
            return 0

        def attribute(found: Any, _attribute: int, address: Any) -> int:
            found._obj.value = 1
            return 0 if address.value in self.pinned else 1

        return SimpleNamespace(
            cuPointerGetAttribute=attribute,
            cuDeviceGet=get,
            cuDevicePrimaryCtxGetState=state,
            cuThreadExchangeStreamCaptureMode=lambda mode: self.modes.append(mode._obj.value),
            cuEventQuery=lambda event: self.query(event.value),
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


class FakeDevice:
    """CuPy's: its context sets the device before, whether it was used or not."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self.cuda, self.number = cuda, number

    def use(self) -> None:
        self.cuda.use(self.number)

    def __enter__(self) -> None:
        self.before = self.cuda.device
        self.use()

    def __exit__(self, *_: object) -> None:
        self.cuda.use(self.before)


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
    monkeypatch.setattr(current_device, "driver", found.driver)
    monkeypatch.setattr(device, "driver", found.driver)
    return found


@pytest.fixture
def memory(cuda: FakeCuda) -> CudaMemory:
    return CudaMemory(1).at(50)


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
    for is_pinned in (False, True):
        array = np.arange(5, dtype=np.int32)
        if is_pinned:
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


_BUSY_DRIVER = """
static volatile int freed;
void free_it(void) { freed = 1; }
/* As CUDA, while another thread is in it: a second at most, so that the test ends in every case. */
int cuEventQuery(void *event) {
    for (long turn = 0; turn < 400000000 && !freed; turn++) {}
    return freed ? 0 : 999;
}
"""


def test_a_look_at_an_event_holds_up_no_other_thread(
    cuda: FakeCuda, memory: CudaMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CUDA waits for may be an abort, which another thread of Python calls."""
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    library = tmp_path / "driver.so"
    source = tmp_path / "driver.c"
    source.write_text(_BUSY_DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True, timeout=60)
    driver = ctypes.CDLL(str(library))
    monkeypatch.setattr(device, "driver", lambda: driver)
    sys.modules["cupy"].cuda.runtime.eventQuery = ctypes.PyDLL(str(library)).cuEventQuery
    mark, seen = memory.record(), []
    thread = threading.Thread(target=lambda: seen.append(mark.done()))
    thread.start()
    time.sleep(0.05)
    driver.free_it()
    thread.join()
    assert seen == [True]


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


def test_kernels_get_addresses_and_the_stream(
    cuda: FakeCuda, memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kernels:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *arguments: cuda.launched.append((name, *arguments, cuda.device))

    monkeypatch.setattr(CudaMemory, "_kernels", Kernels())
    a, b = (memory.allocate(8).view(np.float32) for _ in range(2))
    memory.fold("max", a.dtype, [a, b], b)
    memory.prefixes("sum", a.dtype, [a, b], [b, a])
    memory.gather_pieces([(a, 0, 8), (None, 8, 3), (b, 11, 0)], b)
    assert cuda.launched == [
        ("fold", "max", a.dtype, [a.address, b.address], b.address, 2, 50, 1),
        ("prefixes", "sum", a.dtype, [a.address, b.address], [b.address, a.address], 2, 50, 1),
        ("gather_pieces", [(a.address, 0, 8), (0, 8, 3)], b.address, 50, 1),
    ]


def test_separate_memory_has_a_stream_of_its_own(cuda: FakeCuda, memory: CudaMemory) -> None:
    cuda.queues[1] = []
    other = memory.separate()
    assert (other.device, other.own_stream != memory.own_stream) == (1, True)
    assert (memory.stream, other.stream) == (50, 0)


def test_memory_of_another_stream_is_another_object(cuda: FakeCuda, memory: CudaMemory) -> None:
    other = memory.at(60)
    buffer = memory.allocate(3)
    assert (memory.stream, other.stream, buffer.memory.stream) == (50, 60, 50)
    assert other.own_stream == memory.own_stream


def test_no_context_is_made_on_a_device_that_is_not_used(cuda: FakeCuda) -> None:
    """As on a rank with device 1 whose framework sets no device, and in threads of arraycomm's own."""
    cuda.contexts.clear()
    memory = CudaMemory(1).at(50)
    a, b = memory.upload(np.arange(3)), memory.allocate(24)
    b[...] = a
    memory.record().done()
    memory.download(b.view(a.dtype), np.empty(3, int))
    pinned.pinned(1).empty(100)
    assert cuda.contexts == {1}


def test_threads_of_arraycomm_spare_the_captures_of_others(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Over:
        pending = False

    monkeypatch.setattr(devices, "_LOOK", 0)
    watch = devices._Watch("watch", lambda _: False)
    over: Any = Over()
    watch.add(over)
    deadline = time.monotonic() + 10
    while watch._thread is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert cuda.modes == [2]  # CU_STREAM_CAPTURE_MODE_RELAXED


def test_the_device_in_use_is_current_afterwards(cuda: FakeCuda) -> None:
    CudaMemory(1).at(50).upload(np.arange(3))
    pinned.pinned(1).empty(100)
    assert (cuda.device, cuda.contexts) == (0, {0, 1})


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
