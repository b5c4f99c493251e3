"""MLX's arrays, whose memory may be shared with other arrays."""

from __future__ import annotations

import sys
from typing import Any, Final

import ml_dtypes
import numpy as np

from arraycomm._arrays.buffer import CPU, Array, BufferView, Device, Reader, check_dtype
from arraycomm._arrays.frameworks.base import Framework, no_such_dtype
from arraycomm._dtypes import DType, name_of


def find_reader(kind: type) -> Reader | None:
    """Return the reader of arrays of this type."""
    return read_mlx if issubclass(kind, sys.modules["mlx.core"].array) else None


def read_mlx(x: Any, _name: str) -> BufferView:
    """Read an array in its own memory."""
    mx = sys.modules["mlx.core"]
    if x.dtype == mx.bfloat16:
        array = np.asarray(memoryview(x.view(mx.uint16))).view(ml_dtypes.bfloat16)
    else:
        array = np.asarray(memoryview(x))
    check_dtype(array.dtype)
    array.flags.writeable = False
    return BufferView(array, "mlx", x, True)


def _device(_x: Any) -> Device:
    return CPU


def _to_mlx(array: Array, _like: BufferView) -> Any:
    mx = sys.modules["mlx.core"]
    name = name_of(array.dtype)
    dtype = getattr(mx, "bool_" if name == "bool" else name, None)
    if dtype is None:
        raise no_such_dtype("mlx", array.dtype)
    return mx.array(np.asarray(array, order="C"), dtype=dtype)


def _takes_over(_dtype: DType) -> bool:
    return False


def _commit_out(out: BufferView) -> Any:
    out.source[...] = _to_mlx(out.array, out)
    return out.source


def _widest_float() -> DType:
    return np.dtype(np.float32)


MLX: Final = Framework(
    name="mlx",
    module="mlx.core",
    read=read_mlx,
    device_of=_device,
    to_framework=_to_mlx,
    takes_over=_takes_over,
    commit_out=_commit_out,
    widest_float=_widest_float,
    replaces_out=True,
    reason_to_copy=lambda _: "MLX copies what it is given",
)
