"""Any array as a `BufferView`: every array that the library reads or writes enters here."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, Reader
from arraycomm._arrays.frameworks import BY_NAME, BY_READER, find_reader
from arraycomm._arrays.protocols import read_foreign
from arraycomm._dtypes import DType, name_of

# Readers of the types met so far. A type that no framework claims is not kept: ctypes and others
# create such types at run time, and this table would keep them alive for ever.
_READERS: Final[dict[type, Reader]] = {}

# The elements of a view of which only framework and device are known.
NOTHING: Final = np.empty(0)


def view(x: Any, name: str = "x") -> BufferView:
    """Return `x` as host memory: its own if it is on the host and readable as it is, else a copy.

    Raises `TypeError`, `ValueError`, `OverflowError` or `BufferError`. Messages call `x` by `name`,
    and do not name the operation: the caller does that.
    """
    return (_READERS.get(type(x)) or reader_of(x))(x, name)


def reader_of(x: Any) -> Reader:
    """Return what reads arrays of this type; the protocols, if no framework claims it."""
    kind = type(x)
    reader = _READERS.get(kind)
    if reader is None:
        reader = find_reader(kind)
        if reader is None:
            return read_foreign
        _READERS[kind] = reader
    return reader


def result_prototype(x: Any, name: str) -> BufferView:
    """Return a view of `x` from which only a result's framework and device are taken.

    Its elements are `NOTHING` if the framework can tell the device without them. Then nothing is
    copied from a device, and a tensor that requires gradients is accepted.
    """
    reader = reader_of(x)
    framework = BY_READER.get(reader)
    if framework is None or framework.device_of is None:
        return reader(x, name)
    return BufferView(NOTHING, framework.name, x, True, True, framework.device_of(x))


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
