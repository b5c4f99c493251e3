"""How arrays of each framework on a CUDA device are read and made."""

from __future__ import annotations

import abc
import math
import sys
from contextlib import suppress
from functools import cache
from typing import Any, Final

import numpy as np

from arraycomm._arrays import dlpack
from arraycomm._arrays.buffer import BufferView, allocate
from arraycomm._arrays.current_device import imported, torch_stream, working_on
from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory
from arraycomm._arrays.frameworks.base import no_such_dtype
from arraycomm._arrays.frameworks.cupy import read_cupy
from arraycomm._arrays.frameworks.jax import (
    check_jax,
    jax_device,
    jax_placement,
    keeping_bits,
    read_jax,
)
from arraycomm._arrays.frameworks.torch import (
    check_storage,
    read_torch,
    torch_refusal,
    without_history,
)
from arraycomm._arrays.protocols import check_foreign, read_foreign
from arraycomm._arrays.results import to_framework
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
from arraycomm._cuda.streams import LEASES, cupy_stream, order
from arraycomm._dtypes import BY_NAME, DType, name_of

Shape = tuple[int, ...]

# The device of managed memory, and of replicas on several devices: any device can reach these.
ANY: Final = -1
# cudaStreamPerThread; smaller handles are the legacy default stream's.
PER_THREAD: Final = 2


class Framework(abc.ABC):
    """What one framework can do; its own operations run in its own stream."""

    name: str

    @abc.abstractmethod
    def device(self, x: Any) -> int | None:
        """Return the number of an array's device, or None if it is not on a CUDA device."""

    @abc.abstractmethod
    def streams(self, device: int) -> tuple[int, ...]:
        """Return the streams in which arrays are used now."""

    def captures(self, device: int, streams: tuple[int, ...]) -> bool:
        """Return whether a CUDA graph is captured from what is put on its current `streams`."""
        return False

    def plain_address(self, x: Any, device: int) -> int | None:
        """Return where an array's elements are, one behind the other, on a device.

        None if anything about it is unusual, and for frameworks that show no streams.
        """
        return None

    @abc.abstractmethod
    def export(self, x: Any, name: str, memory: DeviceMemory) -> DeviceExport:
        """Check an array, and return where its elements are."""

    @abc.abstractmethod
    def empty(self, shape: Shape, dtype: DType, source: Any, memory: DeviceMemory) -> DeviceBuffer:
        """Return memory for a result like `source`; its owner is the framework's array, if any."""

    def finish(self, device_buffer: DeviceBuffer, shape: Shape, like: BufferView) -> Any:
        """Return the array over memory that `empty` made."""
        return device_buffer.owner

    def gather(self, export: DeviceExport, source: Any, memory: DeviceMemory) -> DeviceBuffer:
        """Return a contiguous copy of the elements, ready in the memory's stream."""
        _, shape, _, dtype = export.layout
        device_buffer = self.empty(shape, dtype, source, memory)
        _copy_elements(packed(device_buffer.address, shape, dtype), export.layout, memory)
        return device_buffer

    def put_back(self, device_buffer: DeviceBuffer, layout: Layout, out: Any) -> None:
        """Copy the elements of a device buffer into `out`."""
        _copy_elements(
            layout, packed(device_buffer.address, layout.shape, layout.dtype), device_buffer.memory
        )

    def changed(self, out: Any) -> None:
        """Note that the elements of `out` were overwritten."""


def framework_of(x: Any) -> Framework | None:
    """Return the framework of an array, None if it has none with devices; imports nothing."""
    return _BY_READER.get(reader_of(x))


# PyTorch ----------------------------------------------------------------------------------------


class _Torch(Framework):
    name = "torch"

    def device(self, x: Any) -> int | None:
        return (x.device.index or 0) if x.is_cuda else None

    def streams(self, device: int) -> tuple[int, ...]:
        return (torch_stream(device),)

    def captures(self, device: int, streams: tuple[int, ...]) -> bool:
        if streams[0] <= PER_THREAD:
            return False
        cuda = sys.modules["torch"].cuda
        with cuda.device(device):
            return bool(cuda.is_current_stream_capturing())

    def plain_address(self, x: Any, device: int) -> int | None:
        if not x.is_cuda or x.get_device() != device or x.requires_grad or not x.is_contiguous():
            return None
        if x.is_conj() or x.is_neg() or torch_refusal(x) is not None:
            return None
        with suppress(BufferError):
            check_storage(x, "x")
            return int(x.data_ptr())
        return None

    def export(self, x: Any, name: str, memory: DeviceMemory) -> DeviceExport:
        _check_tensor(x, name)
        lazy = x.is_conj() or x.is_neg()
        tensor = x.detach().resolve_conj().resolve_neg() if lazy or x.requires_grad else x
        dtype = _dtype_of(x.dtype)
        strides = tuple(step * dtype.itemsize for step in tensor.stride())
        layout = Layout(tensor.data_ptr(), tuple(tensor.shape), strides, dtype)
        return DeviceExport(layout, False, tensor, copied=lazy)

    def empty(self, shape: Shape, dtype: DType, source: Any, memory: DeviceMemory) -> DeviceBuffer:
        torch = sys.modules["torch"]
        wanted = getattr(torch, name_of(dtype), None)
        if not isinstance(wanted, torch.dtype):
            raise no_such_dtype("torch", dtype)
        return _buffer_of(torch.empty(shape, dtype=wanted, device=source.device), dtype, memory)

    def gather(self, export: DeviceExport, source: Any, memory: DeviceMemory) -> DeviceBuffer:
        tensor: Any = export.owner
        device_buffer = _buffer_of(tensor.contiguous(), export.layout.dtype, memory)
        order(memory, self.streams(memory.device), (memory.stream,))
        return device_buffer

    def put_back(self, device_buffer: DeviceBuffer, layout: Layout, out: Any) -> None:
        memory = device_buffer.memory
        current = self.streams(memory.device)
        order(memory, (memory.stream,), current)
        torch = sys.modules["torch"]
        with torch.no_grad(), torch.inference_mode(out.is_inference()):
            out.copy_(device_buffer.owner)
        order(memory, current, (memory.stream,))

    def changed(self, out: Any) -> None:
        sys.modules["torch"].autograd.graph.increment_version(out)


@cache
def _dtype_of(dtype: Any) -> DType:
    """Return NumPy's dtype, or ml_dtypes', of one of torch's."""
    return BY_NAME[str(dtype).removeprefix("torch.")].dtype


def _check_tensor(x: Any, name: str) -> None:
    if x.requires_grad:
        without_history(x, name)
    reason = torch_refusal(x)
    if reason is not None:
        raise TypeError(f"{name} is {reason}")
    check_storage(x, name)


def _buffer_of(tensor: Any, dtype: DType, memory: DeviceMemory) -> DeviceBuffer:
    return DeviceBuffer(tensor.data_ptr(), tensor.numel(), dtype, tensor, memory)


# CuPy, and the protocols that it reads ----------------------------------------------------------


class _CuPy(Framework):
    name = "cupy"

    def device(self, x: Any) -> int | None:
        return int(x.device.id)

    def streams(self, device: int) -> tuple[int, ...]:
        import cupy

        return (int(cupy.cuda.get_current_stream(device).ptr),)

    def captures(self, device: int, streams: tuple[int, ...]) -> bool:
        # The default streams cannot be captured, and must not be asked while another stream is.
        if streams[0] <= PER_THREAD:
            return False
        import cupy

        with working_on(device):
            return bool(cupy.cuda.get_current_stream(device).is_capturing())

    def plain_address(self, x: Any, device: int) -> int | None:
        plain = x.flags.c_contiguous and x.device.id == device
        return int(x.data.ptr) if plain else None

    def export(self, x: Any, name: str, memory: DeviceMemory) -> DeviceExport:
        return DeviceExport(Layout(int(x.data.ptr), x.shape, x.strides, x.dtype), False, x)

    def empty(self, shape: Shape, dtype: DType, source: Any, memory: DeviceMemory) -> DeviceBuffer:
        import cupy

        count = math.prod(shape)
        with working_on(memory.device):
            space = cupy.cuda.alloc(count * dtype.itemsize)
        if cupy.cuda.get_current_stream(memory.device).ptr == memory.own_stream:
            # CuPy would give it to later work in this stream, while the caller's still reads it.
            lent = cupy.cuda.UnownedMemory(
                space.ptr, count * dtype.itemsize, _Lent(space, memory), memory.device
            )
            space = cupy.cuda.MemoryPointer(lent, 0)
        # Over existing memory, CuPy also makes arrays of dtypes that it has no kernels for.
        return DeviceBuffer(int(space.ptr), count, dtype, cupy.ndarray(shape, dtype, space), memory)


class _Lent:
    """Memory of the communicator's own stream, given back once the caller's has read it."""

    def __init__(self, space: Any, memory: DeviceMemory) -> None:
        self._space, self._memory = space, memory

    def __del__(self) -> None:
        with suppress(Exception):  # the process may end
            stream = _BY_NAME["cupy"].streams(self._memory.device)[0]
            LEASES.add(self._memory.at(stream).record(), self._space)


class _Protocols(_CuPy):
    """Any other object: read by DLPack first, as on the host, or by CUDA's array interface."""

    def device(self, x: Any) -> int | None:
        with suppress(BufferError):  # the error is raised when the array is read
            if _has_dlpack(x):
                kind, device = dlpack.device_of(x, "x")
                return {DEVICE: device, MANAGED: ANY}.get(kind)
            if dlpack.offered(x, "__cuda_array_interface__"):
                return _device_at(by_cuda_interface(x, "x").layout.address)
        return None

    def streams(self, device: int) -> tuple[int, ...]:
        # If CuPy is lacking, that is told when the array is read.
        return super().streams(device) if imported("cupy") is not None else ()

    def plain_address(self, x: Any, device: int) -> int | None:
        return None

    def export(self, x: Any, name: str, memory: DeviceMemory) -> DeviceExport:
        check_foreign(x, name)
        if _has_dlpack(x):
            return by_dlpack(x, memory.stream, name)
        return by_cuda_interface(x, name)


def _has_dlpack(x: Any) -> bool:
    return dlpack.offered(x) and dlpack.offered(x, "__dlpack_device__")


def _device_at(address: int) -> int | None:
    """Return the device of an address; None for the host's, or if CuPy is not loaded."""
    cupy = imported("cupy")
    if cupy is None or not address:
        return None
    runtime = cupy.cuda.runtime
    found = runtime.pointerGetAttributes(address)
    places = {runtime.memoryTypeDevice: int(found.device), runtime.memoryTypeManaged: ANY}
    return places.get(found.type)


def _copy_elements(target: Layout, source: Layout, memory: DeviceMemory) -> None:
    """Copy elements of any dtype with CuPy, in the order of the memory's stream."""
    if not source.size:
        return
    # As integers whose size divides all addresses and strides.
    offsets = (source.address, target.address, *source.strides, *target.strides)
    unit = math.gcd(8, source.dtype.itemsize, *offsets)
    with working_on(memory.device), cupy_stream(memory.stream, memory.device):
        _units(target, unit, memory)[...] = _units(source, unit, memory)


def _units(layout: Layout, unit: int, memory: DeviceMemory) -> Any:
    """Return memory as a CuPy array of integers; the last axis has the integers of one element."""
    address, shape, strides, dtype = layout
    units = Layout(
        address, (*shape, dtype.itemsize // unit), (*strides, unit), np.dtype(f"u{unit}")
    )
    return _cupy_over(units, memory.device, None)


def _cupy_over(layout: Layout, device: int, owner: object) -> Any:
    """Return a CuPy array over existing memory, which keeps the owner alive."""
    import cupy

    nbytes = layout.size * layout.dtype.itemsize
    memory = cupy.cuda.UnownedMemory(layout.address, nbytes, owner, device)
    start = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(layout.shape, layout.dtype, start, layout.strides)


# JAX --------------------------------------------------------------------------------------------


class _JAX(Framework):
    name = "jax"

    def device(self, x: Any) -> int | None:
        if jax_device(x)[0] != "cuda" or x.sharding.memory_kind == "pinned_host":
            return None
        devices = x.sharding.device_set
        return _local_id(next(iter(devices))) if len(devices) == 1 else ANY

    def streams(self, device: int) -> tuple[int, ...]:
        return ()

    def export(self, x: Any, name: str, memory: DeviceMemory) -> DeviceExport:
        check_jax(x, name)
        for shard in x.addressable_shards:
            if _local_id(shard.device) == memory.device:
                return by_dlpack(shard.data, memory.stream, name)._replace(readonly=True)
        raise ValueError(f"{name} has no replica on cuda:{memory.device}")

    def empty(self, shape: Shape, dtype: DType, source: Any, memory: DeviceMemory) -> DeviceBuffer:
        return memory.allocate(math.prod(shape) * dtype.itemsize).view(dtype)

    def finish(self, device_buffer: DeviceBuffer, shape: Shape, like: BufferView) -> Any:
        import jax

        if not device_buffer.size:
            return to_framework(allocate(shape, device_buffer.dtype), like)
        with keeping_bits(device_buffer.dtype, like.source):
            shared = jax.dlpack.from_dlpack(_Handover(device_buffer, shape))
            # JAX may donate only memory of its own; and when its reads of other memory have ended,
            # it does not tell, but for those of this copy.
            array, copied = _copy_in_jax()(shared)
        LEASES.add(_Copied(copied), (shared, device_buffer))
        place = jax_placement(like.source)
        return array if place is None else jax.device_put(array, place)


@cache
def _copy_in_jax() -> Any:
    """Return what copies an array in JAX's stream; a second result is there once the copy is."""
    import jax

    return jax.jit(lambda x: (jax.numpy.copy(x), jax.numpy.zeros((), bool)))


class _Copied:
    """A copy in JAX's stream."""

    def __init__(self, copied: Any) -> None:
        self._copied = copied

    def done(self) -> bool:
        return bool(self._copied.is_ready())


def _local_id(device: Any) -> int:
    """Return CUDA's number of a JAX device, whose own `id` counts over all processes."""
    return int(device.local_hardware_id)


class _Handover:
    """A device buffer that JAX reads; JAX's stream waits for the memory's first."""

    def __init__(self, device_buffer: DeviceBuffer, shape: Shape) -> None:
        self._device_buffer = device_buffer
        self._shape = shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return DEVICE, self._device_buffer.memory.device

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        device_buffer = self._device_buffer
        written = device_buffer.memory.record()
        if stream is None:
            # A client of XLA that cannot wait for events names no stream: no work of its own waits.
            written.synchronize()
        else:
            written.wait_on(stream)
        # CuPy exports integers of every size, but not float8.
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
    read_torch: _BY_NAME["torch"],
    read_cupy: _BY_NAME["cupy"],
    read_jax: _BY_NAME["jax"],
    read_foreign: _Protocols(),
}


def framework_named(name: str) -> Framework:
    """Return the framework of this name, which makes the results of its arrays."""
    return _BY_NAME[name]
