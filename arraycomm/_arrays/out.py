"""The caller's `out`: memory that a result is written to, and what may be wrong with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._arrays.frameworks import BY_NAME
from arraycomm._arrays.views import view
from arraycomm._dtypes import DType, name_of


def view_out(out: Any, shape: tuple[int, ...], dtype: DType) -> BufferView:
    """Return `out` as memory to write a result of this shape and dtype into.

    Raises `ValueError` for another shape, `TypeError` for another dtype or no array at all, and
    `BufferError` if `out` cannot be written.
    """
    found = view(out, "out")
    framework = BY_NAME[found.framework]
    if framework.number:
        raise TypeError(f"out must be an array; got {type(out).__name__}")
    if framework.immutable:
        raise BufferError(
            f"out is a {framework.immutable} array, which is immutable; "
            "use the result instead of out"
        )
    check_out(found, shape, dtype)
    if framework.replaces_out:
        return BufferView(np.empty(shape, dtype), found.framework, out, False, True)
    _check_writable(found, framework.copies_back)
    return found


def check_out(found: BufferView, shape: tuple[int, ...], dtype: DType) -> None:
    """Raise unless `out` has the shape and the dtype of the result."""
    if found.shape != shape:
        raise ValueError(f"out must have the shape {shape}; got {found.shape}")
    if found.dtype != dtype:
        raise TypeError(f"out must have dtype {name_of(dtype)}; got {name_of(found.dtype)}")


def _check_writable(found: BufferView, copies_back: bool) -> None:
    if found.readonly:
        raise BufferError("out is read-only; pass memory that can be written")
    if _overlaps_itself(found.array):
        raise BufferError(
            f"elements of out share memory (strides {found.strides} for shape {found.shape}); "
            "pass an array of its own"
        )
    if found.copied and not copies_back and not isinstance(found.source, np.ndarray):
        raise BufferError(
            "out shows only a copy of its memory, and what is written there would "
            "be lost; pass an array in host memory"
        )


def _overlaps_itself(array: Array) -> bool:
    """Tell whether two elements may share memory: no slice, transpose or diagonal does this."""
    if array.flags.forc or not array.size:
        return False
    reach = array.itemsize
    lengths = ((abs(step), n) for step, n in zip(array.strides, array.shape, strict=True) if n > 1)
    for step, length in sorted(lengths):
        if step < reach:
            return True
        reach += step * (length - 1)
    return False
