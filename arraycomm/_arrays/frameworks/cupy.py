"""CuPy's arrays, which are always on a CUDA device."""

from __future__ import annotations

import sys
from typing import Any, Final

from arraycomm._arrays.buffer import CPU, Array, BufferView, Device, Reader, check_dtype
from arraycomm._arrays.frameworks.base import Framework, OnDevice
from arraycomm._arrays.pinned import pinned
from arraycomm._dtypes import DType


def find_reader(kind: type) -> Reader | None:
    """Return the reader of arrays of this type."""
    return read_cupy if issubclass(kind, sys.modules["cupy"].ndarray) else None


def read_cupy(x: Any, _name: str) -> BufferView:
    """Read an array through pinned memory, in the order of CuPy's current stream."""
    check_dtype(x.dtype)
    with x.device:
        host = pinned().empty(x.nbytes).view(x.dtype).reshape(x.shape)
        x.get(out=host)
    return BufferView(host, "cupy", x, False, True, cupy_device(x))


def cupy_device(x: Any) -> Device:
    """Return an array's device."""
    return ("cuda", x.device.id)


def as_cupy(x: Any) -> Any:
    """Return the device memory of any object as CuPy's array, ordered after its producer."""
    import cupy

    if hasattr(x, "__cuda_array_interface__"):
        return cupy.asarray(x)
    return cupy.from_dlpack(x)


def _to_cupy(array: Array, like: BufferView) -> Any:
    import cupy

    if like.device == CPU:
        return cupy.asarray(array)
    with cupy.cuda.Device(like.device[1]):
        return cupy.asarray(array)


def _takes_over(_dtype: DType) -> bool:
    return False


def _commit_out(out: BufferView) -> Any:
    import cupy

    with cupy.cuda.Device(out.device[1]):
        as_cupy(out.source)[...] = cupy.asarray(out.array)
    return out.source


CUPY: Final = Framework(
    name="cupy",
    module="cupy",
    read=read_cupy,
    device_of=cupy_device,
    to_framework=_to_cupy,
    takes_over=_takes_over,
    commit_out=_commit_out,
    takes_opaque=False,
    copies_back=True,
    reason_to_copy=lambda _: "the result is on cuda",
    on_device=OnDevice(
        own=lambda x, _: as_cupy(x),  # objects that speak a protocol of devices count as CuPy's
        copy=lambda x: x.copy(),
        namespace="cupy",
    ),
)
