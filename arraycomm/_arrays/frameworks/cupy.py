"""CuPy's arrays, which are always on a CUDA device."""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import CPU, Array, BufferView, Device, Reader
from arraycomm._arrays.current_device import working_on
from arraycomm._arrays.frameworks.base import Framework, OnDevice
from arraycomm._arrays.pinned import pinned
from arraycomm._dtypes import DType, Kind, check_movable, kind_of


def find_reader(kind: type) -> Reader | None:
    """Return the reader of arrays of this type."""
    return read_cupy if issubclass(kind, sys.modules["cupy"].ndarray) else None


def read_cupy(x: Any, name: str) -> BufferView:
    """Read an array through pinned memory, in the order of CuPy's current stream."""
    check_movable(x.dtype, name)
    device = x.device.id
    with working_on(device):
        host = pinned(device).empty(x.nbytes).view(_carrier(x.dtype)).reshape(x.shape)
        _as_bits(x).get(out=host)
    return BufferView(host.view(x.dtype), "cupy", x, False, True, cupy_device(x))


def _carrier(dtype: DType) -> DType:
    """Return the dtype in which CuPy moves elements: some of 8 and 16 bits have no kernels."""
    narrow = kind_of(dtype) is Kind.NARROW
    return np.dtype(f"u{dtype.itemsize}") if narrow else dtype


def _as_dtype(x: Any, dtype: DType) -> Any:
    """Return an array of another dtype over the same memory: there, CuPy takes every dtype."""
    import cupy

    return x if x.dtype == dtype else cupy.ndarray(x.shape, dtype, x.data, x.strides)


def _as_bits(x: Any) -> Any:
    """Return an array that CuPy can copy, over the same memory."""
    return _as_dtype(x, _carrier(x.dtype))


def _upload(array: Array) -> Any:
    """Return a copy on the current device."""
    import cupy

    return _as_dtype(cupy.asarray(array.view(_carrier(array.dtype))), array.dtype)


def _copied(x: Any) -> Any:
    return _as_dtype(_as_bits(x).copy(), x.dtype)


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
    if like.device == CPU:
        return _upload(array)
    with working_on(like.device[1]):
        return _upload(array)


def _commit_out(out: BufferView) -> Any:
    with working_on(out.device[1]):
        target = _as_bits(as_cupy(out.source))
        target[...] = _upload(out.array.view(target.dtype))
    return out.source


CUPY: Final = Framework(
    name="cupy",
    module="cupy",
    read=read_cupy,
    device_of=cupy_device,
    to_framework=_to_cupy,
    takes_over=lambda _: False,
    commit_out=_commit_out,
    takes_opaque=False,
    copies_back=True,
    reason_to_copy=lambda _: "the result is on cuda",
    on_device=OnDevice(
        own=lambda x, _: as_cupy(x),  # objects that speak a protocol of devices count as CuPy's
        copy=_copied,
        namespace="cupy",
    ),
)
