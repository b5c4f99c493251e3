"""What each framework's arrays on a CUDA device take to be read, and to be made."""

from __future__ import annotations

import abc
import math
import sys
from contextlib import suppress
from typing import Any, Final

import numpy as np

from arraycomm._arrays import dlpack, frameworks
from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory
from arraycomm._arrays.protocols import read_foreign
from arraycomm._arrays.results import allocate, jax_place, keeping_bits, no_such_dtype, to_framework
from arraycomm._arrays.views import reader_of
from arraycomm._cuda.layouts import (
    DEVICE,
    MANAGED,
    DeviceExport,
    Layout,
    by_cuda_interface,
    by_dlpack,
    packed,
    relabel,
)
from arraycomm._cuda.streams import order
from arraycomm._dtypes import BY_NAME, DType, name_of

Shape = tuple[int, ...]

# Managed memory, and replicas on several devices, are within reach of any.
ANY: Final = -1


class Framework(abc.ABC):
    """The means of one framework. What it does itself, it does in its own stream."""

    name: str

    @abc.abstractmethod
    def device(self, x: Any) -> int | None:
        """Return the number of an array's device, None for an array elsewhere."""

    @abc.abstractmethod
    def streams(self, device: int) -> tuple[int, ...]:
        """Return the streams in which arrays are used now."""

    @abc.abstractmethod
    def show(self, x: Any, operation: str, name: str, memory: DeviceMemory) -> DeviceExport:
        """Check an array, and tell where its elements are."""

    @abc.abstractmethod
    def empty(self, shape: Shape, dtype: DType, source: Any, memory: DeviceMemory) -> DeviceBuffer:
        """Return memory for a result like `source`, owned by the framework's array if it has one."""

    def finish(self, device_buffer: DeviceBuffer, shape: Shape, like: BufferView) -> Any:
        """Return the array over memory that `empty` made."""
        return device_buffer.owner

    def gather(self, shown: DeviceExport, source: Any, memory: DeviceMemory) -> DeviceBuffer:
        """Return a copy of the elements side by side, ready in the memory's stream."""
        _, shape, _, dtype = shown.layout
        device_buffer = self.empty(shape, dtype, source, memory)
        _copy_elements(packed(device_buffer.address, shape, dtype), shown.layout, memory)
        return device_buffer

    def put_back(self, device_buffer: DeviceBuffer, layout: Layout, out: Any) -> None:
        """Copy the elements of a span to where those of `out` are."""
        _copy_elements(
            layout, packed(device_buffer.address, layout.shape, layout.dtype), device_buffer.memory
        )

    def changed(self, out: Any) -> None:
        """Learn that the elements of `out` were overwritten."""


def framework_of(x: Any) -> Framework | None:
    """Return the framework of an array, None where it has none for devices; imports nothing."""
    return _BY_READER.get(reader_of(x))


# PyTorch ----------------------------------------------------------------------------------------


class _Torch(Framework):
    name = "torch"

    def device(self, x: Any) -> int | None:
        return (x.device.index or 0) if x.is_cuda else None

    def streams(self, device: int) -> tuple[int, ...]:
        return (int(sys.modules["torch"].cuda.current_stream(device).cuda_stream),)

    def show(self, x: Any, operation: str, name: str, memory: DeviceMemory) -> DeviceExport:
        _check_tensor(x, operation, name)
        tensor = x.detach().resolve_conj().resolve_neg()
        dtype = BY_NAME[str(x.dtype).removeprefix("torch.")].dtype
        strides = tuple(step * dtype.itemsize for step in tensor.stride())
        layout = Layout(tensor.data_ptr(), tuple(tensor.shape), strides, dtype)
        return DeviceExport(layout, False, tensor, copied=x.is_conj() or x.is_neg())

    def empty(self, shape: Shape, dtype: DType, source: Any, memory: DeviceMemory) -> DeviceBuffer:
        torch = sys.modules["torch"]
        wanted = getattr(torch, name_of(dtype), None)
        if not isinstance(wanted, torch.dtype):
            raise no_such_dtype("torch", dtype, "result")
        return _tensor_span(torch.empty(shape, dtype=wanted, device=source.device), dtype, memory)

    def gather(self, shown: DeviceExport, source: Any, memory: DeviceMemory) -> DeviceBuffer:
        tensor: Any = shown.owner
        device_buffer = _tensor_span(tensor.contiguous(), shown.layout.dtype, memory)
        order(memory, self.streams(memory.device), (memory.stream,))
        return device_buffer

    def put_back(self, device_buffer: DeviceBuffer, layout: Layout, out: Any) -> None:
        order(
            device_buffer.memory,
            (device_buffer.memory.stream,),
            self.streams(device_buffer.memory.device),
        )
        with sys.modules["torch"].no_grad():
            out.copy_(device_buffer.owner)

    def changed(self, out: Any) -> None:
        sys.modules["torch"].autograd.graph.increment_version(out)


def _check_tensor(x: Any, operation: str, name: str) -> None:
    if x.requires_grad:
        frameworks.without_history(x, operation, name)
    reason = frameworks.torch_refusal(x)
    if reason is not None:
        raise TypeError(f"{operation}: {name} is {reason}")
    frameworks.check_storage(x, operation, name)


def _tensor_span(tensor: Any, dtype: DType, memory: DeviceMemory) -> DeviceBuffer:
    return DeviceBuffer(tensor.data_ptr(), tensor.numel(), dtype, tensor, memory)


# CuPy, and the protocols that it reads ----------------------------------------------------------


class _CuPy(Framework):
    name = "cupy"

    def device(self, x: Any) -> int | None:
        return int(x.device.id)

    def streams(self, device: int) -> tuple[int, ...]:
        import cupy

        return (int(cupy.cuda.get_current_stream(device).ptr),)

    def show(self, x: Any, operation: str, name: str, memory: DeviceMemory) -> DeviceExport:
        return DeviceExport(Layout(int(x.data.ptr), x.shape, x.strides, x.dtype), False, x)

    def empty(self, shape: Shape, dtype: DType, source: Any, memory: DeviceMemory) -> DeviceBuffer:
        import cupy

        count = math.prod(shape)
        with cupy.cuda.Device(memory.device):
            space = cupy.cuda.alloc(count * dtype.itemsize)
        # Around memory that is there, CuPy takes also the dtypes that it has no kernels for.
        return DeviceBuffer(int(space.ptr), count, dtype, cupy.ndarray(shape, dtype, space), memory)


class _Protocols(_CuPy):
    """Any other object: DLPack first, as on the host, then CUDA's array interface."""

    def device(self, x: Any) -> int | None:
        with suppress(BufferError):  # who reads the array tells of it
            if _speaks_dlpack(x):
                kind, device = dlpack.device_of(x, "x")
                return {DEVICE: device, MANAGED: ANY}.get(kind)
            if hasattr(x, "__cuda_array_interface__"):
                return _device_at(by_cuda_interface(x, "x").layout.address)
        return None

    def show(self, x: Any, operation: str, name: str, memory: DeviceMemory) -> DeviceExport:
        label = f"{operation}: {name}"
        if _speaks_dlpack(x):
            return by_dlpack(x, memory.stream, label)
        return by_cuda_interface(x, label)


def _speaks_dlpack(x: Any) -> bool:
    return hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__")


def _device_at(address: int) -> int | None:
    """Return the device of an address, None for the host's, or where nothing has loaded CuPy."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not address:
        return None
    runtime = cupy.cuda.runtime
    found = runtime.pointerGetAttributes(address)
    places = {runtime.memoryTypeDevice: int(found.device), runtime.memoryTypeManaged: ANY}
    return places.get(found.type)


def _copy_elements(target: Layout, source: Layout, memory: DeviceMemory) -> None:
    """Copy elements of any dtype by CuPy, in the order of the memory's stream."""
    import cupy

    if not source.size:
        return
    current = _BY_NAME["cupy"].streams(memory.device)
    # Integers of a size that the device can load from each place.
    places = (source.address, target.address, *source.strides, *target.strides)
    unit = math.gcd(8, source.dtype.itemsize, *places)
    order(memory, (memory.stream,), current)
    with cupy.cuda.Device(memory.device):
        _units(target, unit, memory)[...] = _units(source, unit, memory)
    order(memory, current, (memory.stream,))


def _units(layout: Layout, unit: int, memory: DeviceMemory) -> Any:
    """Return memory as CuPy's array of integers, with a last axis for those of an element."""
    address, shape, strides, dtype = layout
    units = Layout(
        address,
        (*shape, dtype.itemsize // unit),
        (*strides, unit),
        np.dtype(f"u{unit}"),
    )
    return _cupy_over(units, memory.device, None)


def _cupy_over(layout: Layout, device: int, owner: object) -> Any:
    """Return CuPy's array over memory that is there, and have it keep the owner."""
    import cupy

    nbytes = layout.size * layout.dtype.itemsize
    memory = cupy.cuda.UnownedMemory(layout.address, nbytes, owner, device)
    start = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(layout.shape, layout.dtype, start, layout.strides)


# JAX --------------------------------------------------------------------------------------------


class _JAX(Framework):
    name = "jax"

    def device(self, x: Any) -> int | None:
        if frameworks.jax_device(x)[0] != "cuda" or x.sharding.memory_kind == "pinned_host":
            return None
        devices = x.sharding.device_set
        return _local_id(next(iter(devices))) if len(devices) == 1 else ANY

    def streams(self, device: int) -> tuple[int, ...]:
        return ()

    def show(self, x: Any, operation: str, name: str, memory: DeviceMemory) -> DeviceExport:
        frameworks.check_jax(x, operation, name)
        for shard in x.addressable_shards:
            if _local_id(shard.device) == memory.device:
                shown = by_dlpack(shard.data, memory.stream, f"{operation}: {name}")
                return shown._replace(readonly=True)
        raise ValueError(f"{operation}: {name} has no replica on cuda:{memory.device}")

    def empty(self, shape: Shape, dtype: DType, source: Any, memory: DeviceMemory) -> DeviceBuffer:
        return memory.allocate(math.prod(shape) * dtype.itemsize).view(dtype)

    def finish(self, device_buffer: DeviceBuffer, shape: Shape, like: BufferView) -> Any:
        import jax

        if not device_buffer.size:
            return to_framework(allocate(shape, device_buffer.dtype), like)
        with keeping_bits(device_buffer.dtype, like.source, "result"):
            array = jax.dlpack.from_dlpack(_Handover(device_buffer, shape))
        place = jax_place(like.source)
        return array if place is None else jax.device_put(array, place)


def _local_id(device: Any) -> int:
    """Return CUDA's number of a device of JAX's, whose `id` counts over all processes."""
    return int(device.local_hardware_id)


class _Handover:
    """A span that JAX takes over, after having a stream of its own wait for the memory's."""

    def __init__(self, device_buffer: DeviceBuffer, shape: Shape) -> None:
        self._span = device_buffer
        self._shape = shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return DEVICE, self._span.memory.device

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        device_buffer = self._span
        device_buffer.memory.record().wait_on(stream or 0)
        # CuPy exports every integer, and no float8.
        carrier = (
            np.dtype(f"u{device_buffer.itemsize}")
            if device_buffer.itemsize <= 8
            else device_buffer.dtype
        )
        layout = packed(device_buffer.address, self._shape, carrier)
        array = _cupy_over(layout, device_buffer.memory.device, device_buffer)
        return relabel(array.__dlpack__(stream=-1), device_buffer.dtype)


_BY_NAME: Final[dict[str, Framework]] = {row.name: row for row in (_Torch(), _CuPy(), _JAX())}
_BY_READER: Final[dict[Any, Framework]] = {
    frameworks.read_torch: _BY_NAME["torch"],
    frameworks.read_cupy: _BY_NAME["cupy"],
    frameworks.read_jax: _BY_NAME["jax"],
    read_foreign: _Protocols(),
}


def framework_named(name: str) -> Framework:
    """Return the framework that makes the results of a view."""
    return _BY_NAME[name]
