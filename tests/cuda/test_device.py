"""A device's memory over the device in software: what is asked of CUDA, and in which order.

What CuPy and CUDA do, no test here knows.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from arraycomm._arrays import pinned
from arraycomm._cuda import device, devices, driver
from arraycomm._cuda.device import CudaMemory
from arraycomm._errors import TransportError
from tests.support.device import elements, library, software_device

ILLEGAL_ADDRESS = 700
CUDA = "libcuda.so.1"
POISON = 0xA5


@pytest.fixture
def cuda() -> Iterator[Any]:
    with software_device(2) as machine:
        yield machine


@pytest.fixture
def memory(cuda: Any) -> CudaMemory:
    """Memory of device 1 in a stream of its own, while device 0 is current."""
    cuda.use(0)
    memory = CudaMemory(1)
    return memory.at(memory.own_stream)


def error(status: int) -> Exception:
    found: Exception = sys.modules["cupy"].cuda.runtime.CUDARuntimeError(status)
    return found


def hold(cuda: Any, memory: CudaMemory) -> threading.Event:
    """Keep the memory's stream busy until the event is set."""
    event = threading.Event()
    with device.current(memory.device):
        cuda.stream(memory.stream).put("hold", lambda: event.wait(5))
    return event


def values(memory: CudaMemory, device_buffer: Any) -> list[int]:
    into = np.empty(device_buffer.size, device_buffer.dtype)
    memory.download(device_buffer, into)
    return into.tolist()


def test_memory_is_of_the_device_and_in_the_order_of_the_stream(cuda, memory) -> None:
    import cupy

    found = memory.allocate(100)
    assert (found.size, found.dtype, found.memory) == (100, np.dtype(np.uint8), memory)
    other = memory.separate()
    spaces: list[Any] = [found.owner, other.at(other.own_stream).allocate(1).owner]
    pairs = [(space.mem.stream.device, space.mem.stream.handle) for space in spaces]
    assert pairs == [(1, memory.stream), (1, other.own_stream)]
    assert cuda.here.device == 0
    assert cupy.cuda.get_current_stream().ptr == 0


def test_older_cupy_has_no_streams_from_outside(cuda, memory, monkeypatch) -> None:
    cupy = sys.modules["cupy"]
    monkeypatch.delattr(cupy.cuda.Stream, "from_external")
    space: Any = memory.allocate(1).owner
    assert space.mem.stream.handle == memory.stream


def test_upload_is_done_with_the_array(cuda: Any, memory: CudaMemory) -> None:
    held = hold(cuda, memory)
    threading.Timer(0.05, held.set).start()
    for array in (np.arange(5, dtype=np.int32), pinned.pinned(1).empty(20).view(np.int32)):
        array[...] = range(5)
        device_buffer = memory.upload(array)
        array[...] = -1
        assert values(memory, device_buffer) == [0, 1, 2, 3, 4]
        assert device_buffer.dtype == np.int32


def test_download_waits_for_what_is_on_the_stream_before_it(cuda: Any, memory: CudaMemory) -> None:
    a, b = memory.upload(np.arange(4)), memory.allocate(32).view(np.int64)
    threading.Timer(0.05, hold(cuda, memory).set).start()
    b[...] = a
    assert values(memory, b) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="fit"):
        memory.download(b, np.zeros(3, np.int64))


def test_what_is_empty_is_not_copied(cuda: Any, memory: CudaMemory) -> None:
    device_buffer = memory.upload(np.empty(0, np.float32))
    memory.download(device_buffer, np.empty(0, np.float32))
    memory.fold("sum", device_buffer.dtype, [device_buffer], device_buffer)
    memory.prefixes("sum", device_buffer.dtype, [device_buffer], [device_buffer])
    memory.gather_pieces([(None, 0, 0)], device_buffer)
    memory.spoil(device_buffer, memory.words(1).ctypes.data)
    assert {note.what for note in cuda.log} <= {"record", "synchronize"}


_BUSY_DRIVER = """
static volatile int freed;
void free_it(void) { freed = 1; }
/* As CUDA, while another thread is in it: a second at most, so that the test ends in every case. */
int cuEventQuery(void *event) {
    for (long turn = 0; turn < 400000000 && !freed; turn++) {}
    return freed ? 0 : 999;
}
"""


def test_a_look_at_an_event_holds_up_no_other_thread(cuda, memory, tmp_path, monkeypatch) -> None:
    """What CUDA waits for may be an abort, which another thread of Python calls."""
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    path, source = tmp_path / "driver.so", tmp_path / "driver.c"
    source.write_text(_BUSY_DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", path], check=True, timeout=60)
    busy = ctypes.CDLL(str(path))
    mark = memory.record()
    driver._functions.clear()
    monkeypatch.setattr(driver, "driver", lambda: busy)
    runtime = sys.modules["cupy"].cuda.runtime
    monkeypatch.setattr(runtime, "eventQuery", ctypes.PyDLL(str(path)).cuEventQuery)
    with ThreadPoolExecutor(1) as threads:
        seen = threads.submit(mark.done)
        time.sleep(0.05)
        busy.free_it()
        assert seen.result()


def test_errors_of_calls_and_of_the_driver_are_raised_as_ours(cuda, memory: CudaMemory) -> None:
    a, b, words = memory.allocate(1), memory.allocate(1), memory.words(1)
    library(CUDA).fails["cuStreamWriteValue32_v2"] = 1
    with pytest.raises(TransportError, match=r"CUDA reported: cudaError 1$"):
        memory.write(words.ctypes.data, 5)
    mark = memory.record()
    cuda.fail(ILLEGAL_ADDRESS)
    # Not taken for work that never ends.
    for call in (mark.done, lambda: b.__setitem__(..., a)):
        with pytest.raises(TransportError, match="CUDA reported: cudaError 700"):
            call()


def test_kernels_are_launched_on_the_stream_of_the_device(cuda: Any, memory: CudaMemory) -> None:
    a, b = memory.upload(np.float32([1, 5])), memory.upload(np.float32([3, 4]))
    bytes_of = memory.allocate(11)

    def launch() -> None:
        memory.prefixes("sum", a.dtype, [a, b], [b, a])
        memory.fold("max", a.dtype, [a, b], b)
        memory.gather_pieces([(b.view("u1"), 0, 8), (None, 8, 3), (b.view("u1"), 11, 0)], bytes_of)

    # Kernels are loaded once the device is idle.
    launch()
    a[...], b[...] = memory.upload(np.float32([1, 5])), memory.upload(np.float32([3, 4]))
    memory.record().synchronize()
    cuda.log.clear()
    held = hold(cuda, memory)
    launch()
    assert elements(b).tolist() == [3, 4]
    held.set()
    assert values(memory, b) == [4, 9]
    assert values(memory, bytes_of) == [*np.float32([4, 9]).tobytes(), 0, 0, 0]
    launched = [(note.what, note.stream) for note in cuda.log]
    for name in ("prefixes", "fold_few", "copy_pieces"):
        assert (name, memory.stream) in launched


@pytest.mark.parametrize("given_up", [0, 1])
def test_results_are_spoilt_if_they_are_given_up_by_then(cuda, memory, given_up) -> None:
    word, device_buffer = memory.words(1), memory.upload(np.float32([1, 2]))
    memory.load()
    held = hold(cuda, memory)
    memory.spoil(device_buffer, word.ctypes.data)
    word[0] = given_up
    held.set()
    assert all(np.isnan(x) for x in values(memory, device_buffer)) == bool(given_up)


def test_a_thread_without_a_context_gets_that_of_the_device(cuda: Any, memory: CudaMemory) -> None:
    """CUDA's driver knows no default, as its runtime does."""
    device_buffer, word, mark = memory.upload(np.arange(3)), memory.words(1), memory.record()

    def work() -> None:
        # Device 1 is current here as far as the runtime tells, without a context.
        cuda.here.device = 1
        assert mark.done() in (False, True)
        cuda.here.bound = False
        memory.write(word.ctypes.data, 3)
        cuda.here.bound = False
        memory.fold("sum", device_buffer.dtype, [device_buffer], device_buffer)
        memory.record().synchronize()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()
    assert word[0] == 3


def test_memory_that_is_closed_keeps_nothing_for_its_stream(cuda: Any, memory: CudaMemory) -> None:
    before = cuda.pool.total
    memory.allocate(10_000)
    kept = CudaMemory(1)
    other = kept.at(kept.own_stream).allocate(5000)
    del other
    memory.close()
    assert cuda.pool.total == before + 5120


def test_no_context_is_made_on_a_device_that_is_not_used(cuda: Any) -> None:
    """As on a rank with device 1 whose framework sets no device, and in threads of arraycomm's own."""
    cuda.contexts.clear()
    memory = CudaMemory(1)
    memory = memory.at(memory.own_stream)
    a, b = memory.upload(np.arange(3)), memory.allocate(24).view(np.int64)
    b[...] = a
    memory.record().done()
    memory.fold("sum", a.dtype, [a, b], b)
    memory.write(memory.words(1).ctypes.data, 1)
    memory.download(b, np.empty(3, int))
    pinned.pinned(1).empty(100)
    assert cuda.contexts == {1}


def test_threads_of_arraycomm_spare_the_captures_of_others(cuda, monkeypatch) -> None:
    class Over:
        pass

    monkeypatch.setattr(devices, "_LOOK", 0)
    watch = devices._Watch("watch", lambda _: None, lambda _: False)
    over: Any = Over()
    watch.add(over)
    deadline = time.monotonic() + 10
    while watch._thread is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert library(CUDA).modes == [2]  # CU_STREAM_CAPTURE_MODE_RELAXED


def test_the_uuid_is_read_beyond_a_zero(cuda: Any) -> None:
    assert device.uuid(1) == "c000" + 14 * "01"


# What there is -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "words"), [(35, "driver"), (100, "CUDA_VISIBLE_DEVICES"), (None, "no CUDA device")]
)
def test_what_is_missing_is_said(cuda: Any, status: int | None, words: str) -> None:
    assert (device.missing(), device.count()) == (None, 2)
    cuda.devices = error(status) if status else 0
    assert words in (device.missing() or "")


def test_a_cupy_for_rocm_is_not_enough(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "is_hip", True)
    assert "ROCm" in (device.missing() or "")


def test_a_missing_cupy_is_said_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "pip install cupy-cuda12x" in (device.missing() or "")


@pytest.mark.parametrize(
    ("local_rank", "wanted", "chosen"),
    [(0, None, 0), (1, None, 1), (2, None, 0), (5, "cuda", 1), (0, "cuda:1", 1), (7, "cuda:0", 0)],
)
def test_ranks_take_the_devices_in_turn(cuda, local_rank, wanted, chosen) -> None:
    assert device.choose_device(local_rank, wanted) == chosen


@pytest.mark.parametrize("wanted", ["cuda:2", "cuda:-1", "cuda:", "cpu", "CUDA", "cuda:1x"])
def test_a_device_that_is_not_there_is_refused(cuda: Any, wanted: str) -> None:
    with pytest.raises(ValueError, match="device"):
        device.choose_device(0, wanted)


def test_who_shares_a_device_is_named() -> None:
    assert device.shared_devices(["a", "b", "c"]) == ""
    text = device.shared_devices(["a", "b", "a", "c", "b", "a"])
    assert text == "ranks 0, 2, 5 and ranks 1, 4 share a CUDA device"
