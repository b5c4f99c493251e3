"""Results: new memory, and arrays of the caller's framework over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from arraycomm._arrays.buffer import CPU, Array, BufferView, allocate
from arraycomm._arrays.frameworks import BY_NAME
from arraycomm._arrays.views import view
from arraycomm._dtypes import DType, name_of


def allocate_like(shape: tuple[int, ...], dtype: DType, like: BufferView) -> Array:
    """Return memory as `allocate` does, or the framework's own, which `to_framework` takes over."""
    own = BY_NAME[like.framework].allocate if like.device == CPU else None
    return allocate(shape, dtype) if own is None else own(shape, dtype)


def to_framework(array: Array, like: BufferView) -> Any:
    """Return `array` as an array of the framework and on the device of `like`.

    The caller must not use `array` any more: the framework takes its memory over if it can, see
    `Framework.takes_over`.
    """
    framework = BY_NAME[like.framework]
    made = framework.to_framework(array, like)
    if framework.promoting_like is None:
        return made
    return framework.promoting_like(made, like.source)


def check_result(shape: tuple[int, ...], dtype: DType, like: BufferView) -> None:
    """Raise unless a result like an array of an unknown type can be made; others always can."""
    if like.framework == "namespace":
        to_framework(allocate(shape, dtype), like)


def commit_out(out: BufferView) -> Any:
    """Finish a write into `out.array`, and return the caller's `out`.

    A view that is a copy is copied back. PyTorch is told that the tensor changed, so that autograd
    notices if an older value was saved.
    """
    return BY_NAME[out.framework].commit_out(out)


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
    array = found.array
    if overlaps_itself(array.shape, array.strides, array.itemsize):
        raise BufferError(
            f"elements of out share memory (strides {found.strides} for shape {found.shape}); "
            "pass an array of its own"
        )
    if found.copied and not copies_back and not isinstance(found.source, np.ndarray):
        raise BufferError(
            "out shows only a copy of its memory, and what is written there would "
            "be lost; pass an array in host memory"
        )


def overlaps_itself(shape: Sequence[int], strides: Sequence[int], reach: int = 1) -> bool:
    """Return whether two elements may share memory: no slice, transpose or diagonal does this.

    An element reaches over this many of the strides' units.
    """
    if 0 in shape:
        return False
    lengths = ((abs(step), n) for step, n in zip(strides, shape, strict=True) if n > 1)
    for step, length in sorted(lengths):
        if step < reach:
            return True
        reach += step * (length - 1)
    return False
