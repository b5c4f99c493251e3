"""Device arrays through the door: staged, or where they are; in stream order, and back there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arraycomm._arrays import pinned
from arraycomm._arrays.exchange import exchange
from arraycomm._arrays.results import commit_out, to_framework, view_out
from arraycomm._arrays.views import view
from arraycomm._cuda import arrays
from arraycomm._dtypes import BY_NAME, TABLE
from tests.cuda.on_device.conftest import spin

cupy = pytest.importorskip("cupy")
try:
    _DEVICES = cupy.cuda.runtime.getDeviceCount()
except cupy.cuda.runtime.CUDARuntimeError:
    _DEVICES = 0
pytestmark = pytest.mark.skipif(not _DEVICES, reason="no CUDA device")

DTYPES = [row.dtype for row in TABLE]
LAYOUTS = {
    "contiguous": lambda a: a,
    "sliced": lambda a: a[:, ::2],
    "transposed": lambda a: a.T,
    "negative": lambda a: a[::-1],
    "0-d": lambda a: a[1, 2],
    "empty": lambda a: a[:0],
}


def torch_on_device() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return torch


# Each dtype in one layout, and each layout with one dtype.
ROWS = [(dtype, "transposed") for dtype in DTYPES] + [(np.dtype("float32"), n) for n in LAYOUTS]
EACH = pytest.mark.parametrize(("dtype", "layout"), ROWS, ids=str)


def on_the_device(dtype: Any, layout: str) -> Any:
    """Return an array on the device, and the same one on the host."""
    host = np.arange(12).reshape(3, 4).astype(dtype)
    data = cupy.asarray(host.reshape(-1).view(np.uint8)).data
    return LAYOUTS[layout](cupy.ndarray((3, 4), dtype, data)), np.asarray(LAYOUTS[layout](host))


def test_reading_waits_for_the_current_stream() -> None:
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.ones((2000, 2000), "float64")
        for _ in range(20):
            x = x @ x / 2000
        assert view(x).array[0, 0] == 1


class Interface:
    """Has a CUDA array interface and nothing else."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.__cuda_array_interface__ = x.__cuda_array_interface__


def test_cuda_array_interface_gives_cupy() -> None:
    x = Interface(cupy.arange(3))
    found = view(x)
    assert found.array.tolist() == [0, 1, 2]
    assert isinstance(to_framework(np.ones(3), found), cupy.ndarray)
    out = view_out(x, (3,), np.dtype("int64"))
    out.array[...] = 7
    assert commit_out(out) is x
    assert x.x.tolist() == [7, 7, 7]
    there = exchange(x, "cupy", copy=False)
    assert isinstance(there, cupy.ndarray)
    assert there.data.ptr == x.x.data.ptr


def test_exchange_stays_on_the_device() -> None:
    torch = torch_on_device()
    x = cupy.arange(6, dtype="float32")
    t = exchange(x, "torch", copy=False)
    assert t.data_ptr() == x.data.ptr
    assert exchange(t, x, copy=False).data.ptr == x.data.ptr
    assert exchange(t, "cupy", copy=True).data.ptr != x.data.ptr
    assert torch.equal(exchange(np.arange(6, dtype="float32"), t), t)


def test_exchange_between_host_and_device_copies() -> None:
    here, there = np.arange(3), cupy.arange(3)
    for x, to, place in ((there, "numpy", "x"), (there, here, "x"), (here, "cupy", "the result")):
        assert exchange(x, to).tolist() == [0, 1, 2]
        with pytest.raises(BufferError, match=f"{place} is on cuda"):
            exchange(x, to, copy=False)


@pytest.mark.skipif(_DEVICES < 2, reason="needs two devices")
def test_results_go_to_the_sources_device() -> None:
    with cupy.cuda.Device(1):
        x = cupy.arange(3)
    assert to_framework(view(x).array.copy(), view(x)).device.id == 1


# Where they are: spans, in the order of streams, and no way over the host -------------------------

LENGTH = 1 << 20


@pytest.fixture
def memory() -> Any:
    """Memory in a stream of its own, which waits for no other by itself."""
    from arraycomm._cuda.device import CudaMemory

    stream = cupy.cuda.Stream(non_blocking=True)
    memory: Any = CudaMemory(0)
    yield memory.at(stream.ptr)
    stream.synchronize()


def on_host(device_buffer: Any) -> Any:
    """The elements of a span, once its memory's stream has come so far."""
    array = np.empty(device_buffer.size, device_buffer.dtype)
    device_buffer.memory.download(device_buffer, array)
    return array


def filled(value: float, memory: Any) -> Any:
    return memory.upload(np.full(LENGTH, value, np.float32))


class OfCuPy:
    """CuPy, at work in a stream that waits for no other by itself."""

    def __init__(self) -> None:
        self.context = cupy.cuda.Stream(non_blocking=True)
        self.stream = self.context.ptr

    def full(self, value: float) -> Any:
        return cupy.full(LENGTH, value, "float32")


class OfTorch:
    """The same of PyTorch, whose streams are all of that kind."""

    def __init__(self) -> None:
        self.torch = torch_on_device()
        stream = self.torch.cuda.Stream()
        self.context = self.torch.cuda.stream(stream)
        self.stream = stream.cuda_stream

    def full(self, value: float) -> Any:
        return self.torch.full((LENGTH,), value, device="cuda", dtype=self.torch.float32)


@pytest.fixture(params=[OfCuPy, OfTorch])
def worker(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_a_span_is_read_after_its_framework_wrote(worker: Any, memory: Any) -> None:
    with worker.context:
        x = worker.full(0)
        spin(worker.stream)
        x += 1
        found = arrays.device_view(x, "x", memory)
    assert (on_host(found.device_buffer.copy()) == 1).all()


def test_a_frameworks_copy_is_read_after_it_was_made(worker: Any, memory: Any) -> None:
    with worker.context:
        x = worker.full(0)
        spin(worker.stream)
        x += 1
        found = arrays.device_view(x[::2], "x", memory)
    assert found.copied
    assert (on_host(found.device_buffer.copy()) == 1).all()


def test_a_framework_writes_after_a_span_was_read(worker: Any, memory: Any) -> None:
    with worker.context:
        x = worker.full(1)
        found = arrays.device_view(x, "x", memory)
        spin(memory.stream)
        copy = found.device_buffer.copy()
        arrays.release(found)
        x += 1
    assert (on_host(copy) == 1).all()


def test_a_framework_reads_a_result_after_it_was_written(worker: Any, memory: Any) -> None:
    source = filled(3, memory)
    with worker.context:
        like = arrays.device_view(worker.full(0), "x", memory)
        made, device_buffer = arrays.empty_like(like, (LENGTH,), like.dtype, memory)
        spin(memory.stream)
        device_buffer[...] = source
        under_way = memory.record()
        result = arrays.finish(made, like)
        waited = under_way.done()
        assert float((result + 1).min()) == 4
    assert not waited  # the device has, and not the host


def test_results_are_written_after_their_memory_was_used_before(worker: Any, memory: Any) -> None:
    with worker.context:
        x = worker.full(0)
        like = arrays.device_view(x, "x", memory)
        source = filled(3, memory)
        spin(worker.stream)
        old = worker.full(5)
        old += 1  # under way when its memory is free again, for arrays of this stream
        del old
        made, device_buffer = arrays.empty_like(like, (LENGTH,), like.dtype, memory)
        device_buffer[...] = source
        assert float(arrays.finish(made, like).max()) == 3


@pytest.mark.parametrize("step", [1, 2])
def test_a_framework_reads_out_after_it_was_written(worker: Any, memory: Any, step: int) -> None:
    source = filled(3, memory)[: LENGTH // step]
    with worker.context:
        whole = worker.full(0)
        out = whole[::step]
        found = arrays.view_out(out, (LENGTH // step,), np.dtype("float32"), memory)
        spin(memory.stream)
        assert arrays.commit_out(found, source) is out
        assert float(whole.sum()) == 3 * (LENGTH // step)


@EACH
def test_cupy_is_read_where_it_is(dtype: Any, layout: str, memory: Any) -> None:
    x, wanted = on_the_device(dtype, layout)
    found = arrays.device_view(x, "x", memory)
    assert (found.framework, found.device, found.source is x) == ("cupy", ("cuda", 0), True)
    assert (found.dtype, found.shape, found.readonly) == (dtype, wanted.shape, False)
    assert on_host(found.device_buffer).tobytes() == wanted.tobytes()
    assert found.copied == (not x.flags.c_contiguous)
    assert (found.device_buffer.address == x.data.ptr) == x.flags.c_contiguous or not x.size
    made, device_buffer = arrays.empty_like(found, wanted.shape, dtype, memory)
    device_buffer[...] = found.device_buffer
    result = arrays.finish(made, found)
    assert isinstance(result, cupy.ndarray)
    assert (result.dtype, result.shape) == (dtype, wanted.shape)
    assert result.data.ptr == device_buffer.address or not x.size
    assert view(result).array.tobytes() == wanted.tobytes()


@EACH
def test_torch_is_read_where_it_is(dtype: Any, layout: str, memory: Any) -> None:
    torch = torch_on_device()
    if layout == "negative":
        pytest.skip("torch has no negative strides")
    kind = getattr(torch, dtype.name)
    x = LAYOUTS[layout](torch.arange(12, device="cuda").reshape(3, 4).to(kind))
    found = arrays.device_view(x, "x", memory)
    wanted = x.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    assert (found.dtype, found.shape) == (dtype, tuple(x.shape))
    assert on_host(found.device_buffer).tobytes() == wanted
    assert (found.device_buffer.address == x.data_ptr()) == x.is_contiguous() or not x.numel()
    made, device_buffer = arrays.empty_like(found, found.shape, found.dtype, memory)
    device_buffer[...] = found.device_buffer
    result = arrays.finish(made, found)
    assert (result.dtype, result.device, tuple(result.shape)) == (x.dtype, x.device, found.shape)
    assert result.data_ptr() == device_buffer.address or not x.numel()
    assert result.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes() == wanted


def jax_on_device() -> Any:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    return jax


@pytest.mark.parametrize("dtype", ["bool", "uint16", "complex64", "bfloat16", "float8_e5m2"])
def test_jax_is_read_and_made_where_it_is(dtype: str, memory: Any) -> None:
    jax = jax_on_device()
    x = jax.numpy.arange(12).reshape(3, 4).astype(BY_NAME[dtype].dtype)
    found = arrays.device_view(x, "x", memory)
    assert found.device_buffer.address == x.unsafe_buffer_pointer()
    made, device_buffer = arrays.empty_like(found, (3, 4), found.dtype, memory)
    device_buffer[...] = found.device_buffer
    result = arrays.finish(made, found)
    assert result.unsafe_buffer_pointer() != device_buffer.address
    assert result.devices() == x.devices()
    assert np.asarray(result).tobytes() == np.asarray(x).tobytes()
    donated = jax.jit(lambda a: a, donate_argnums=0)(result)
    assert result.is_deleted()
    assert np.asarray(donated).tobytes() == np.asarray(x).tobytes()


def test_managed_memory_is_the_devices_and_pinned_memory_the_hosts() -> None:
    torch = torch_on_device()
    assert not arrays.on_cuda(torch.ones(3).pin_memory())

    x = cupy.ndarray(3, "float64", cupy.cuda.malloc_managed(24))
    managed = SimpleNamespace(__dlpack__=x.__dlpack__, __dlpack_device__=x.__dlpack_device__)
    assert arrays.device_of(managed) == -1


def test_an_interface_is_read_where_it_is(memory: Any) -> None:
    x = cupy.arange(6, dtype="float32")
    assert arrays.device_of(Interface(x)) == x.device.id
    assert arrays.device_view(Interface(x), "x", memory).device_buffer.address == x.data.ptr


@pytest.mark.skipif(_DEVICES < 2, reason="needs two devices")
def test_an_array_of_another_device_is_refused(memory: Any) -> None:
    with cupy.cuda.Device(1):
        x = cupy.arange(3)
    with pytest.raises(ValueError, match="x is on cuda:1, but this communicator works on cuda:0"):
        arrays.device_view(x, "x", memory)


# Pinned memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 1000, 100_000])
def test_chunks_go_through_pinned_memory_and_back(memory: Any, count: int) -> None:
    source = memory.upload(np.arange(count, dtype=np.int64))
    target = memory.allocate(8 * count)
    chunks = pinned.staged_chunks(source, 65536, pinned.pinned(0))
    places = pinned.unstaged_chunks(target, 65536, pinned.pinned(0))
    spin(memory.stream)
    for (here, chunk), (free, place) in zip(chunks, places, strict=True):
        for mark in (here, free):
            while mark is not None and not mark.done():
                pass
        assert cupy.cuda.pinned_memory.is_memory_pinned(chunk.__array_interface__["data"][0])
        place[...] = chunk
    assert on_host(target.view("int64")).tolist() == list(range(count))
