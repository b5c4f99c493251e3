"""Where an array's elements lie on a device, read from protocols; the memory is not touched."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

from arraycomm._arrays import dlpack
from arraycomm._dtypes import BY_DTYPE, DType

# kDLCUDA and kDLCUDAManaged. Pinned memory, kDLCUDAHost, counts as the host's.
DEVICE: Final = 2
MANAGED: Final = 13
# The legacy default stream in CUDA's protocols; as a handle it is also the null pointer.
_LEGACY: Final = 1


class Layout(NamedTuple):
    """The first element's address, and the strides in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType

    @property
    def size(self) -> int:
        """How many elements there are."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements are contiguous in C order."""
        reach = self.dtype.itemsize
        for length, step in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length > 1 and step != reach:
                return not self.size
            reach *= length
        return True

    @property
    def fit(self) -> bool:
        """Whether kernels can work on the elements where they are."""
        return self.contiguous and (not self.size or self.address % self.dtype.alignment == 0)

    @property
    def overlaps_itself(self) -> bool:
        """Whether two elements may share memory; False for slices, transposes and diagonals."""
        reach = self.dtype.itemsize
        steps = zip(self.strides, self.shape, strict=True)
        for step, length in sorted((abs(step), length) for step, length in steps if length > 1):
            if step < reach:
                return bool(self.size)
            reach += step * (length - 1)
        return False


def packed(address: int, shape: tuple[int, ...], dtype: DType) -> Layout:
    """Return the layout of elements that are contiguous in C order."""
    lengths = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return Layout(address, shape, tuple(n * dtype.itemsize for n in lengths), dtype)


class DeviceExport(NamedTuple):
    """Where an exported array's elements lie, and the object that keeps them alive.

    `copied` says that they are a copy, since no layout describes the array's own elements. `stream`
    is one in which the array is used, besides those of its framework.
    """

    layout: Layout
    readonly: bool
    owner: object
    copied: bool = False
    stream: int | None = None


def by_dlpack(x: Any, stream: int, label: str) -> DeviceExport:
    """Read `x.__dlpack__`; the producer makes `stream` wait for its work on the array."""
    number = stream or _LEGACY
    keyword_fallbacks = ({"stream": number, "max_version": (1, 0)}, {"stream": number})
    capsule = dlpack.request(x, keyword_fallbacks, label)
    tensor, flags = dlpack.open_capsule(capsule, label)
    if tensor.device_type not in {DEVICE, MANAGED}:
        raise BufferError(
            f"{label}.__dlpack__() returned memory of device type {tensor.device_type}, which is "
            "not CUDA's, as __dlpack_device__ says"
        )
    # The capsule is not consumed, so it calls the producer's deleter when it is collected.
    return DeviceExport(_layout_of(tensor, label), bool(flags & dlpack.READ_ONLY), (capsule, x))


def _layout_of(tensor: Any, label: str) -> Layout:
    call = f"{label}.__dlpack__()"
    shape = dlpack.integers(tensor.shape, tensor.ndim, call, "shape")
    dtype = dlpack.dtype_of(tensor, label)
    address = (tensor.data or 0) + tensor.byte_offset if tensor.data else 0
    if not tensor.strides:
        return _checked(packed(address, shape, dtype), label)
    counts = dlpack.integers(tensor.strides, tensor.ndim, call, "strides")
    strides = tuple(count * dtype.itemsize for count in counts)
    return _checked(Layout(address, shape, strides, dtype), label)


def by_cuda_interface(x: Any, label: str) -> DeviceExport:
    """Read `x.__cuda_array_interface__`; its `stream` is one that the reader must wait for."""
    interface = x.__cuda_array_interface__
    label = f"{label}.__cuda_array_interface__"
    if not isinstance(interface, dict):
        raise BufferError(f"{label} must be a dict; got {type(interface).__name__}")
    dlpack.check_unmasked(interface, label)
    dtype = dlpack.parse_dtype(interface.get("typestr"), interface.get("descr"), label)
    shape = dlpack.tuple_of_integers(interface.get("shape"), f"{label}['shape']")
    data = interface.get("data")
    if not isinstance(data, tuple):
        raise BufferError(f"{label}['data'] must be (address, read-only); got {data!r}")
    address, readonly = dlpack.address_of(data, label)
    layout = packed(address, shape, dtype)
    if interface.get("strides") is not None:
        strides = dlpack.tuple_of_integers(interface["strides"], f"{label}['strides']")
        if len(strides) != len(shape):
            raise BufferError(f"{label} has shape {shape} but strides {strides}")
        layout = layout._replace(strides=strides)
    stream = interface.get("stream")
    if stream is not None and (not isinstance(stream, int) or stream < 1):
        raise BufferError(f"{label}['stream'] must be None or a stream, not 0; got {stream!r}")
    return DeviceExport(_checked(layout, label), readonly, x, stream=stream)


def _checked(layout: Layout, label: str) -> Layout:
    dlpack.check_extent(*layout[:3], layout.dtype.itemsize, label)
    return layout


def relabel(capsule: Any, dtype: DType) -> Any:
    """Change the dtype of a new capsule of integers to `dtype`, which has the same size."""
    tensor, _ = dlpack.open_capsule(capsule, "result")
    tensor.code = BY_DTYPE[dtype].dlpack
    tensor.bits = dtype.itemsize * 8
    return capsule
