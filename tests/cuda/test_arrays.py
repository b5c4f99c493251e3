"""The door for arrays on a device, over the device in software.

Torch's tensors and JAX's arrays are real, on the host, which is taken for the device. What the device itself
does is for tests/cuda/on_device.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arraycomm._arrays import dlpack, views
from arraycomm._arrays import results as host_out
from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory
from arraycomm._arrays.frameworks.jax import WIDE
from arraycomm._cuda import arrays, frameworks, layouts, streams
from arraycomm._cuda.device import CudaMemory
from arraycomm._dtypes import BY_NAME, TABLE, DType
from arraycomm._errors import TransportError
from tests.support.device import elements as elements_now
from tests.support.device import software_device
from tests.support.frameworks import pointer

Array = np.ndarray[Any, Any]
DTYPES = [row.dtype for row in TABLE]
LAYOUTS: dict[str, Any] = {
    "contiguous": lambda a: a,
    "sliced": lambda a: a[:, ::2],
    "transposed": lambda a: a.T,
    "offset": lambda a: a[1:, 1:],
    "0-d": lambda a: a[1, 2],
    "empty": lambda a: a[:0, ::2],
    "one row": lambda a: a[:1],
}
# Each dtype in one layout, and each layout with one dtype.
ROWS = [(dtype, "transposed") for dtype in DTYPES] + [(np.dtype("float32"), n) for n in LAYOUTS]
EACH = pytest.mark.parametrize(("dtype", "layout"), ROWS, ids=str)
OUTS = pytest.mark.parametrize(
    ("dtype", "layout"), [row for row in ROWS if row[1] not in {"0-d", "empty"}], ids=str
)


class LoggedMark:
    """An event that has come once it is said to have; the log names streams by who uses them."""

    def __init__(self, memory: LoggedMemory, event: Any) -> None:
        self.memory, self.event, self.passed = memory, event, False

    def done(self) -> bool:
        return self.passed

    def wait_on(self, stream: int) -> None:
        names = NAMES
        self.memory.log.append((names.get(stream, stream), "after", names.get(self.memory.stream)))
        self.event.wait_on(stream)

    def synchronize(self) -> None:
        self.memory.log.append(("host", "after", NAMES.get(self.memory.stream)))
        self.event.synchronize()


class LoggedMemory(CudaMemory):
    """Keeps a log of what waits for what."""

    def __init__(self, device: int = 0) -> None:
        super().__init__(device)
        self.stream = self.own_stream
        NAMES[self.stream] = OWN
        self.log: list[Any] = []
        self.marks: list[LoggedMark] = []

    def copy(self, target: DeviceBuffer, source: DeviceBuffer) -> None:
        self.log.append("copy")
        super().copy(target, source)

    def record(self) -> LoggedMark:
        self.marks.append(LoggedMark(self, super().record()))
        return self.marks[-1]


# The streams of the frameworks, and the memory's own; and what their handles are called.
TORCH, CUPY, OWN, PRODUCER = "torch", "cupy", "own", "producer"
NAMES: dict[int, str] = {}


@pytest.fixture(autouse=True)
def cupy() -> Iterator[Any]:
    with software_device(3):
        import cupy as module

        NAMES.clear()
        stream = module.cuda.Stream(non_blocking=True)
        NAMES[stream.ptr] = CUPY
        with stream:
            yield module


def side(cupy: Any, name: str) -> Any:
    """Return a new stream, and what the log calls it."""
    stream = cupy.cuda.Stream(non_blocking=True)
    NAMES[stream.ptr] = name
    return stream


@pytest.fixture
def memory(cupy: Any) -> LoggedMemory:
    return LoggedMemory()


def synchronize() -> None:
    from cupy._machine import machine

    machine.synchronize()


def elements(device_buffer: DeviceBuffer) -> Any:
    """What is in a span once the device has done its work, without a copy."""
    synchronize()
    return elements_now(device_buffer)


def host(x: Any) -> Array:
    """What is in an array of CuPy's once the device has done its work, without a copy."""
    synchronize()
    found: Array = x.elements
    return found


def some(dtype: Any) -> Array:
    return np.arange(12).reshape(3, 4).astype(dtype)


def as_cupy(array: Array) -> Any:
    """Return an array on the device that lies there as the array lies on the host."""
    import cupy

    low, high = np.lib.array_utils.byte_bounds(array) if array.size else (pointer(array),) * 2
    whole = dlpack.array_at(low, (high - low,), None, np.dtype(np.uint8), False, array, "array")
    there = cupy.asarray(whole.copy()).data
    return cupy.ndarray(array.shape, array.dtype, there + (pointer(array) - low), array.strides)


# CuPy --------------------------------------------------------------------------------------------


def same_error(here: Callable[[], Any], there: Callable[[], Any]) -> None:
    """Both raise, with the same words: what the host's door refuses, the device's does."""
    with pytest.raises((TypeError, ValueError, BufferError)) as wanted:
        here()
    with pytest.raises(wanted.type) as caught:
        there()
    assert str(caught.value) == str(wanted.value)


def test_a_framework_may_go_on_in_another_stream(cupy: Any, memory: LoggedMemory) -> None:
    x = as_cupy(some(float))
    found = arrays.device_view(x, "x", memory)
    out = arrays.view_out(x, (3, 4), x.dtype, memory)
    made, _ = arrays.empty_like(found, (3,), found.dtype, memory)
    wanted = [(CUPY, "after", OWN), ("other", "after", OWN)]
    for end in (
        lambda: arrays.finish(made, found),
        lambda: arrays.release(found),
        lambda: arrays.commit_out(out, out.device_buffer),
    ):
        memory.log.clear()
        with side(cupy, "other"):
            end()
        assert memory.log == wanted


def test_streams_in_which_no_call_can_take_its_place_are_refused(cupy: Any) -> None:
    x = as_cupy(some(float))
    refused = r"^the current stream of cupy is .*{}.*; make the"
    captured = side(cupy, "captured")
    with captured:
        captured.begin_capture()
        with pytest.raises(ValueError, match=refused.format("CUDA graph")):
            arrays.check_stream(x)
        captured.end_capture()
        arrays.check_stream(x)
    per_thread = refused.format("default stream of each thread")
    with cupy.cuda.Stream.ptds, pytest.raises(ValueError, match=per_thread):
        arrays.check_stream(x)


def test_the_default_stream_is_not_asked_whether_it_is_captured(cupy, monkeypatch) -> None:
    """CUDA refuses to say."""
    x = as_cupy(some(float))
    null = cupy.cuda.Stream.null
    monkeypatch.setattr(type(null), "is_capturing", lambda _: pytest.fail("asked"))
    with null:
        arrays.check_stream(x)


def test_a_stream_is_asked_while_another_device_is_current(cupy: Any) -> None:
    x = as_cupy(some(float))
    cupy.cuda.Device(1).use()
    assert arrays.check_stream(x) == (cupy.cuda.get_current_stream(0).ptr,)
    assert cupy.cuda.Device().id == 1


def test_one_stream_needs_no_events(cupy: Any, memory: LoggedMemory) -> None:
    x = as_cupy(some(float).T)
    memory = memory.at(cupy.cuda.get_current_stream().ptr)
    found = arrays.device_view(x, "x", memory)
    arrays.finish(arrays.empty_like(found, (3,), found.dtype, memory)[0], found)
    out = arrays.view_out(x, x.shape, x.dtype, memory)
    arrays.commit_out(out, out.device_buffer)
    assert not memory.log
    assert not memory.marks


@pytest.mark.parametrize(("stream", "other", "same"), [(0, 1, True), (1, 0, True), (0, 2, False)])
def test_the_legacy_stream_has_two_names(memory, stream, other, same) -> None:
    streams.order(memory, (stream,), (other,))
    assert [waiting for waiting, _, _ in memory.log] == ([] if same else [other])


def test_an_array_of_another_device_is_refused(cupy: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^x is on cuda:0, but this communicator .* cuda:1; call cupy"
    ):
        arrays.device_view(as_cupy(some(float)), "x", LoggedMemory(1))


def test_dtypes_that_do_not_travel_are_refused(cupy: Any, memory: LoggedMemory) -> None:
    with pytest.raises(TypeError, match=r"^dtype \w+ is not supported"):
        arrays.device_view(as_cupy(some(np.longdouble)), "x", memory)


@pytest.mark.parametrize(
    ("make", "shape", "dtype"),
    [
        (lambda: some(float), (4, 3), float),
        (lambda: some(float), (3, 4), np.float32),
        (lambda: np.lib.stride_tricks.as_strided(some(float), (3, 2), (8, 8)), (3, 2), float),
        (lambda: np.lib.stride_tricks.as_strided(some(float), (3, 2), (0, 8)), (3, 2), float),
    ],
)
def test_errors_of_out_are_the_hosts(cupy, memory, make, shape, dtype) -> None:
    wanted = shape, np.dtype(dtype)
    same_error(
        lambda: host_out.view_out(make(), *wanted),
        lambda: arrays.view_out(as_cupy(make()), *wanted, memory),
    )


def test_read_only_out_is_refused(cupy: Any, memory: LoggedMemory) -> None:
    array = some(float)
    array.flags.writeable = False
    same_error(
        lambda: host_out.view_out(array, (3, 4), array.dtype),
        lambda: arrays.view_out(Producer(array), (3, 4), array.dtype, memory),
    )


@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n != "0-d"])
def test_no_slice_overlaps_itself(layout: str) -> None:
    array = LAYOUTS[layout](some(float))[::-1]
    shown = layouts.Layout(1, array.shape, array.strides, array.dtype)
    assert not shown.overlaps_itself
    assert shown.contiguous == array.flags.c_contiguous
    assert not layouts.Layout(1, (3, 0), (0, 8), np.dtype(float)).overlaps_itself


# Protocols ---------------------------------------------------------------------------------------


class Producer:
    """Shows NumPy's memory as a device's, by DLPack."""

    def __init__(
        self, array: Array, place: tuple[int, int] = (2, 0), versioned: bool = True
    ) -> None:
        self.array, self.place, self.versioned = array, place, versioned
        self.asked: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options.pop("stream"))
        carrier = self.array
        if not self.versioned and options:
            raise TypeError("no such keyword")
        if carrier.dtype.kind == "V" or carrier.dtype.name.startswith("float8"):
            carrier = carrier.view(f"u{carrier.itemsize}")
        return on_cuda(carrier.__dlpack__(**options), self.array.dtype, self.place)


def on_cuda(capsule: Any, dtype: DType, place: tuple[int, int] = (2, 0)) -> Any:
    layouts.relabel(capsule, dtype)
    tensor, _ = dlpack.open_capsule(capsule, "test")
    tensor.device_type, tensor.device_id = place
    return capsule


@EACH
def test_dlpack_is_read_where_it_is(cupy, memory, dtype, layout) -> None:
    array = np.asarray(LAYOUTS[layout](some(dtype)), dtype)
    x = Producer(array)
    assert arrays.device_of(x) == 0
    found = arrays.device_view(x, "x", memory)
    assert x.asked == [memory.stream]
    assert (found.framework, found.shape, found.dtype) == ("cupy", array.shape, dtype)
    assert elements(found.device_buffer).tobytes() == array.tobytes()
    if array.size and array.flags.c_contiguous:
        assert found.device_buffer.address == pointer(array)


def test_dlpack_without_a_version_is_read_only(cupy: Any, memory: LoggedMemory) -> None:
    x = Producer(some(float), versioned=False)
    assert arrays.device_view(x, "x", memory).readonly
    assert x.asked == [memory.stream] * 2


def test_the_legacy_stream_is_number_one_in_dlpack(cupy: Any, memory: LoggedMemory) -> None:
    x = Producer(some(float))
    arrays.device_view(x, "x", memory.at(0))
    assert x.asked == [1]


@pytest.mark.parametrize(
    ("place", "device"),
    [((2, 3), 3), ((13, 5), -1), ((1, 0), None), ((3, 0), None), ((10, 0), None)],
)
def test_dlpacks_places(place: tuple[int, int], device: int | None) -> None:
    x = Producer(some(float), place)
    assert arrays.device_of(x) == device
    assert arrays.on_cuda(x) == (device is not None)
    assert not x.asked


def test_managed_memory_is_of_every_device(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = Producer(some(float), (13, 0))
    assert arrays.device_view(x, "x", LoggedMemory(2)).device == ("cuda", 2)
    mine = (cupy.cuda.get_current_stream().ptr,)
    assert arrays.check_stream(x) == mine
    cupy.cuda.Device(1).use()
    assert arrays.check_stream(x, home=0) == mine
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert arrays.check_stream(x) == ()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda array: array.__dlpack__(), r"^x.__dlpack__\(\) returned memory of device type 1"),
        (lambda _: None, "must return a DLPack capsule"),
        (lambda _: "capsule", "must return a DLPack capsule"),
        (lambda _: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_capsule_of_a_device_is_refused(cupy, memory, answer, said) -> None:
    class Wrong(Producer):
        def __dlpack__(self, **options: Any) -> Any:
            return answer(self.array)

    with pytest.raises(BufferError, match=said):
        arrays.device_view(Wrong(some(float)), "x", memory)


def test_the_producer_lives_as_long_as_the_span(cupy: Any, memory: LoggedMemory) -> None:
    array = some(float)
    before = sys.getrefcount(array)
    device_buffer = arrays.device_view(Producer(array), "x", memory).device_buffer[2:5]
    assert sys.getrefcount(array) > before
    assert elements(device_buffer).tolist() == [2, 3, 4]
    del device_buffer
    assert sys.getrefcount(array) == before


class Interface:
    def __init__(self, array: Array, **changes: Any) -> None:
        shown = dict(array.__array_interface__)
        shown["strides"] = None if array.flags.c_contiguous else array.strides
        self.array = array
        self.__cuda_array_interface__ = {**shown, "version": 3, **changes}


@pytest.fixture
def placed(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy knows of addresses what is set here."""
    found = SimpleNamespace(type=2, device=0)
    monkeypatch.setattr(cupy.cuda.runtime, "pointerGetAttributes", lambda _: found)
    return found


@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n != "empty"])
def test_the_array_interface_is_read_where_it_is(placed, memory, layout) -> None:
    array = np.asarray(LAYOUTS[layout](some(np.float32)))
    found = arrays.device_view(Interface(array), "x", memory)
    assert (found.framework, found.shape, found.dtype) == ("cupy", array.shape, array.dtype)
    assert elements(found.device_buffer).tobytes() == array.tobytes()
    assert found.copied != array.flags.c_contiguous


def test_the_array_interfaces_stream_waits_both_ways(placed, cupy, memory) -> None:
    producer = side(cupy, PRODUCER)
    out = Interface(some(float), stream=producer.ptr)
    found = arrays.view_out(out, (3, 4), np.dtype(float), memory)
    assert memory.log == [(OWN, "after", CUPY), (OWN, "after", PRODUCER)]
    memory.log.clear()
    arrays.commit_out(found, found.device_buffer)
    assert memory.log == [(CUPY, "after", OWN), (PRODUCER, "after", OWN)]


@pytest.mark.parametrize(("offset", "unit"), [(0, 4), (1, 1), (2, 2)])
def test_elements_are_copied_by_what_their_places_allow(
    placed, cupy, memory, monkeypatch, offset, unit
) -> None:
    units, made = set(), cupy.ndarray

    def array_at(shape: Any, dtype: DType, *place: Any) -> Any:
        units.add(dtype.itemsize)
        return made(shape, dtype, *place)

    monkeypatch.setattr(cupy, "ndarray", array_at)
    fields = {"names": ["x"], "formats": ["f8"], "offsets": [offset], "itemsize": 12 + offset % 2}
    array = np.zeros(5, np.dtype(fields))["x"]
    array[...] = np.arange(5) / 3
    found = arrays.device_view(Interface(array), "x", memory)
    assert elements(found.device_buffer).tolist() == array.tolist()
    assert min(units) == unit


@pytest.mark.parametrize(("kind", "device"), [(0, None), (1, None), (2, 4), (3, -1)])
def test_the_array_interfaces_places(placed: Any, kind: int, device: int | None) -> None:
    placed.type, placed.device = kind, 4
    assert arrays.device_of(Interface(some(float))) == device


def test_an_array_interface_without_elements_is_on_no_device(placed: Any) -> None:
    empty = np.empty((0, 3))
    assert arrays.device_of(Interface(empty)) == 0
    assert arrays.device_of(Interface(empty, data=(0, False))) is None


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"stream": 0}, BufferError, "stream"),
        ({"stream": "a"}, BufferError, "stream"),
        ({"mask": 1}, TypeError, "mask"),
        ({"typestr": "x"}, BufferError, "type string"),
        ({"typestr": ">f8"}, TypeError, "not supported"),
        ({"shape": [3, 4]}, BufferError, "tuple"),
        ({"strides": (8,)}, BufferError, "strides"),
        ({"data": None}, BufferError, "address"),
        ({"data": (0, False)}, BufferError, "null pointer"),
    ],
)
def test_a_malformed_array_interface_is_refused(
    placed, memory, changes, error, match, monkeypatch
) -> None:
    monkeypatch.setattr(frameworks._Protocols, "device", lambda *_: 0)
    with pytest.raises(error, match=match) as caught:
        arrays.device_view(Interface(some(float), **changes), "x", memory)
    assert str(caught.value).startswith(("x.", "dtype "))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"requires_grad": True}, "gradient would be lost"),
        ({"__array_ufunc__": lambda *_: None}, "arithmetic of its own"),
    ],
    ids=["gradient", "arithmetic"],
)
def test_what_memory_does_not_say_is_not_lost_on_devices(placed, memory, said, words) -> None:
    kind = type("Other", (Interface,), said)
    with pytest.raises(TypeError, match=words):
        arrays.device_view(kind(some(float)), "x", memory)
    with pytest.raises(TypeError, match=words):
        arrays.view_out(kind(some(float)), (3, 4), np.dtype(float), memory)


def test_a_malformed_object_is_on_no_device(cupy: Any) -> None:
    class Wrong:
        __cuda_array_interface__ = 3

        def __dlpack__(self) -> None: ...
        def __dlpack_device__(self) -> None: ...

    assert not arrays.on_cuda(Wrong())
    del Wrong.__dlpack__
    assert not arrays.on_cuda(Wrong())


# PyTorch -----------------------------------------------------------------------------------------


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch, cupy: Any) -> Any:
    """PyTorch, whose host is taken for a device with a stream of its own."""
    module = pytest.importorskip("torch")
    monkeypatch.setattr(frameworks._Torch, "device", lambda *_: 0)
    stream = side(cupy, TORCH)
    monkeypatch.setattr(frameworks._Torch, "streams", lambda *_: (stream.ptr,))
    return module


def bits(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


@EACH
def test_torch_is_read_where_it_is(torch, memory, dtype, layout) -> None:
    x = LAYOUTS[layout](torch.arange(12).reshape(3, 4).to(getattr(torch, dtype.name)))
    found = arrays.device_view(x, "x", memory)
    assert (found.framework, found.shape, found.dtype) == ("torch", tuple(x.shape), dtype)
    assert elements(found.device_buffer).tobytes() == bits(x)
    assert found.copied != x.is_contiguous()
    if x.numel():
        assert (found.device_buffer.address == x.data_ptr()) == x.is_contiguous()
    assert memory.log[0] == (OWN, "after", TORCH)
    assert (OWN, "after", CUPY) not in memory.log  # torch gathers by itself


def test_torchs_copies_are_between_the_memorys_work(torch: Any, memory: LoggedMemory) -> None:
    x = torch.zeros(3, 4).T
    arrays.device_view(x, "x", memory)
    assert memory.log == [(OWN, "after", TORCH)] * 2  # the elements, and then their copy
    out = arrays.view_out(x, (4, 3), np.dtype("float32"), memory)
    memory.log.clear()
    arrays.commit_out(out, out.device_buffer)
    assert memory.log == [(TORCH, "after", OWN), (OWN, "after", TORCH), (TORCH, "after", OWN)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_of_torch_are_in_its_own_memory(torch, memory, dtype) -> None:
    like = arrays.device_view(torch.ones(3), "x", memory)
    memory.log.clear()
    made, device_buffer = arrays.empty_like(like, (2, 3), dtype, memory)
    assert memory.log == [(OWN, "after", TORCH)]
    elements(device_buffer)[...] = np.arange(6).astype(dtype)
    memory.log.clear()
    result = arrays.finish(made, like)
    assert set(memory.log) == {(TORCH, "after", OWN)}
    assert (result.data_ptr(), tuple(result.shape)) == (device_buffer.address, (2, 3))
    assert bits(result) == np.arange(6).astype(dtype).tobytes()


def test_a_dtype_that_torch_lacks_is_told(torch: Any, memory: LoggedMemory) -> None:
    like = arrays.device_view(torch.ones(3), "x", memory)
    with pytest.raises(TypeError, match=r"torch has no dtype datetime64\[s\]"):
        arrays.empty_like(like, (3,), np.dtype("M8[s]"), memory)


@OUTS
def test_torch_out_is_written_in_place(torch, memory, dtype, layout) -> None:
    whole = torch.zeros((3, 4), dtype=getattr(torch, dtype.name))
    out = LAYOUTS[layout](whole)
    version = whole._version
    values = (1 + np.arange(out.numel())).astype(dtype)
    found = arrays.view_out(out, tuple(out.shape), dtype, memory)
    elements(found.device_buffer)[...] = values
    memory.log.clear()
    assert arrays.commit_out(found, found.device_buffer) is out
    assert memory.log[0] == (TORCH, "after", OWN)
    assert bits(out) == values.tobytes()
    assert whole._version > version


def test_a_capture_of_torch_is_refused(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="current stream of torch is captured into a CUDA graph"):
        arrays.check_stream(torch.ones(3))


def test_autograd_notices_a_write(torch: Any, memory: LoggedMemory) -> None:
    w = torch.ones(3, requires_grad=True)
    x = torch.ones(3)
    loss = (w * x).sum()
    out = arrays.view_out(x, (3,), np.dtype("float32"), memory)
    arrays.commit_out(out, out.device_buffer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("values", "view"),
    [([1 + 2j, 3 - 4j], lambda x: x.conj()), ([1.0, 2.0], lambda x: x._neg_view())],
    ids=["conjugates", "negatives"],
)
def test_lazy_views_are_resolved(torch: Any, memory: LoggedMemory, values: Any, view: Any) -> None:
    x = torch.tensor(values)
    found = arrays.device_view(view(x), "x", memory)
    assert elements(found.device_buffer).tolist() == view(x).tolist()
    assert found.copied
    for mode in (False, True):
        with torch.inference_mode(mode):
            lazy = view(torch.tensor(values))
        out = arrays.view_out(lazy, (2,), found.dtype, memory)
        elements(out.device_buffer)[...] = [5, 6]
        arrays.commit_out(out, out.device_buffer)
        assert lazy.tolist() == [5, 6]
        host_out.commit_out(host_out.view_out(lazy, (2,), found.dtype))


class TestRefusals:
    """What the host's door refuses, in its words."""

    def check(self, x: Any, memory: DeviceMemory) -> None:
        same_error(lambda: views.view(x), lambda: arrays.device_view(x, "x", memory))

    def test_gradients(self, torch: Any, memory: LoggedMemory) -> None:
        x = torch.ones(3, requires_grad=True)
        self.check(x, memory)
        self.check(x * 2, memory)
        with torch.no_grad():
            found = arrays.device_view(x, "x", memory)
        assert found.device_buffer.address == x.data_ptr()

    def test_tensors_without_memory(self, torch: Any, memory: LoggedMemory) -> None:
        self.check(torch.eye(3).to_sparse(), memory)
        self.check(torch.ones(3, device="meta"), memory)
        self.check(torch.nested.nested_tensor([torch.ones(3)], layout=torch.jagged), memory)
        resized = torch.ones(3)
        resized.untyped_storage().resize_(0)
        self.check(resized, memory)

    def test_transformed_tensors(self, torch: Any, memory: LoggedMemory) -> None:
        def inside(x: Any) -> Any:
            self.check(x, memory)
            return x

        torch.vmap(inside)(torch.ones(2, 3))


# JAX ---------------------------------------------------------------------------------------------


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch, cupy: Any) -> Any:
    """JAX, whose host is taken for a device; `asked` are the streams that it let wait."""
    module = pytest.importorskip("jax")
    asked: list[int] = []

    def request(x: Any, keyword_fallbacks: Any, _label: str) -> Any:
        asked.append(keyword_fallbacks[0]["stream"])
        return on_cuda(x.__dlpack__(), np.dtype(x.dtype))

    monkeypatch.setattr(dlpack, "request", request)
    monkeypatch.setattr(frameworks, "jax_device", lambda _: ("cuda", 0))
    monkeypatch.setattr(frameworks, "_local_id", lambda _: 0)
    monkeypatch.setattr(frameworks._Handover, "__dlpack_device__", lambda _: (1, 0))
    monkeypatch.setattr(cupy.ndarray, "__dlpack_device__", lambda _: (1, 0))
    return SimpleNamespace(numpy=module.numpy, asked=asked, module=module)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in WIDE], ids=str)
def test_jax_is_read_where_it_is(jax: Any, memory: LoggedMemory, dtype: DType) -> None:
    x = jax.numpy.arange(12).reshape(3, 4).astype(dtype)
    assert arrays.check_stream(x) == ()
    found = arrays.device_view(x, "x", memory)
    assert (found.framework, found.shape, found.dtype) == ("jax", (3, 4), dtype)
    assert (found.device_buffer.address, found.copied) == (x.unsafe_buffer_pointer(), False)
    assert elements(found.device_buffer).tobytes() == np.asarray(x).tobytes()
    assert found.readonly
    assert jax.asked == [memory.stream]


def test_jaxs_memory_is_read_only_whatever_its_capsule_says(jax, memory, monkeypatch) -> None:
    def by_dlpack(*arguments: Any) -> Any:
        return layouts.by_dlpack(*arguments)._replace(readonly=False)

    monkeypatch.setattr(frameworks, "by_dlpack", by_dlpack)
    assert arrays.device_view(jax.numpy.ones(3), "x", memory).readonly


@pytest.mark.parametrize("name", ["bool", "int32", "bfloat16", "float8_e5m2", "complex64"])
def test_results_of_jax_are_handed_over(jax: Any, memory: LoggedMemory, name: str) -> None:
    dtype = BY_NAME[name].dtype
    like = arrays.device_view(jax.numpy.ones(3), "x", memory)
    made, device_buffer = arrays.empty_like(like, (2, 3), dtype, memory)
    elements(device_buffer)[...] = np.arange(6).astype(dtype)
    assert not memory.log
    result = arrays.finish(made, like)
    # On the host JAX names no stream that could wait.
    assert memory.log == [("host", "after", OWN)]
    assert isinstance(result, jax.module.Array)
    assert (result.shape, result.dtype) == ((2, 3), dtype)
    assert result.unsafe_buffer_pointer() != device_buffer.address
    assert np.asarray(result).tobytes() == np.arange(6).astype(dtype).tobytes()
    # JAX may do with it what it likes.
    elements(device_buffer)[...] = np.zeros(6, dtype)
    donated = jax.module.jit(lambda x: x, donate_argnums=0)(result)
    assert result.is_deleted()
    assert np.asarray(donated).tobytes() == np.arange(6).astype(dtype).tobytes()


@pytest.mark.parametrize("shape", [(0, 3), ()])
def test_results_of_jax_have_any_shape(jax: Any, memory: LoggedMemory, shape: Any) -> None:
    like = arrays.device_view(jax.numpy.ones(3), "x", memory)
    made, device_buffer = arrays.empty_like(like, shape, np.dtype("float32"), memory)
    elements(device_buffer)[...] = 2
    result = arrays.finish(made, like)
    assert result.shape == shape
    assert (result == 2).all()
    assert bool(memory.log) == bool(result.size)  # memory of no bytes is not handed over


def test_memory_that_jax_reads_is_kept_until_it_has(jax, memory, monkeypatch) -> None:
    """JAX's stream may come to it long after; the memory's pool knows nothing of that stream."""
    copy, ready = frameworks._copy_in_jax(), threading.Event()

    def noted(shared: Any) -> Any:
        return copy(shared)[0], SimpleNamespace(is_ready=ready.is_set)

    monkeypatch.setattr(frameworks, "_copy_in_jax", lambda: noted)
    like = arrays.device_view(jax.numpy.ones(3), "x", memory)
    made, device_buffer = arrays.empty_like(like, (3,), np.dtype("float32"), memory)
    elements(device_buffer)[...] = 2
    kept = weakref.ref(device_buffer.owner)
    result = arrays.finish(made, like)
    del made, device_buffer
    for mark in memory.marks:
        mark.passed = True
    frameworks.LEASES.sweep()
    gc.collect()
    assert kept() is not None
    ready.set()
    frameworks.LEASES.sweep()
    gc.collect()
    assert kept() is None
    assert result.tolist() == [2, 2, 2]


def test_jax_keeps_64_bits_only_where_it_may(jax: Any, memory: LoggedMemory) -> None:
    like = arrays.device_view(jax.numpy.ones(3), "x", memory)
    made, _ = arrays.empty_like(like, (3,), np.dtype("float64"), memory)
    with pytest.raises(TypeError, match="64-bit mode is off"):
        arrays.finish(made, like)
    with jax.module.enable_x64(True):
        made, device_buffer = arrays.empty_like(like, (3,), np.dtype("float64"), memory)
        elements(device_buffer)[...] = 1 / 3
        assert arrays.finish(made, like).tolist() == [1 / 3] * 3


def test_jaxs_memory_is_held_until_the_device_is_done(jax: Any, memory: LoggedMemory) -> None:
    held = arrays.LEASES._kept
    found = arrays.device_view(jax.numpy.ones(3), "x", memory)
    arrays.release(found)
    mark = memory.marks[-1]
    assert [(m, v) for m, v in held] == [(mark, found)]
    arrays.device_view(jax.numpy.ones(3), "x", memory)
    assert held
    mark.passed = True
    arrays.device_view(jax.numpy.ones(3), "x", memory)
    assert not held


def test_keys_and_deleted_arrays_are_refused_and_any_as_out(jax, memory) -> None:
    wanted = jax.numpy.ones(3), (3,), np.dtype("float32")
    same_error(lambda: host_out.view_out(*wanted), lambda: arrays.view_out(*wanted, memory))
    deleted = jax.numpy.ones(3)
    deleted.delete()
    for x in (jax.module.random.key(0), deleted):
        same_error(lambda x=x: views.view(x), lambda x=x: arrays.device_view(x, "x", memory))


# Everything else ---------------------------------------------------------------------------------


def test_the_host_is_no_device() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    scalars = (1, 2.0, None, [1], "a", b"abc", memoryview(b"a"), np.float32(1))
    for x in (*scalars, np.ones(3), np.ma.ones(3), torch.ones(3), jax.numpy.ones(3)):
        assert not arrays.on_cuda(x)
        assert arrays.check_stream(x) == ()


def test_a_view_of_the_host_has_nothing_to_release() -> None:
    arrays.release(BufferView(np.ones(3), "numpy", None, False))


def test_lease_is_kept_if_the_device_cannot_say_whether_it_has_finished() -> None:
    class Lost:
        def done(self) -> bool:
            raise TransportError("the device is lost")

    leases = streams.Leases()
    leases.add(Lost(), "memory")
    with pytest.raises(TransportError):
        leases.sweep()
    assert len(leases) == 1
