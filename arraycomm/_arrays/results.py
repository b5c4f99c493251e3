"""Results: new memory, and arrays of the caller's framework over it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._arrays.frameworks import BY_NAME
from arraycomm._dtypes import DType

_ALIGNMENT: Final = 64  # JAX takes over memory of this alignment and copies any other
_BYTE: Final = np.dtype(np.uint8)
_from_buffer: Final[Callable[[Any], ctypes.c_char]] = ctypes.c_char.from_buffer

# Every small call passes here, so these are found by one look-up.
_TO_FRAMEWORK: Final = {name: row.to_framework for name, row in BY_NAME.items()}
_COMMIT_OUT: Final = {name: row.commit_out for name, row in BY_NAME.items()}


def allocate(shape: tuple[int, ...], dtype: DType) -> Array:
    """Return new uninitialised memory, C-contiguous and aligned to 64 bytes."""
    memory = np.empty(math.prod(shape) * dtype.itemsize + _ALIGNMENT, _BYTE)
    return np.ndarray(shape, dtype, memory, -ctypes.addressof(_from_buffer(memory)) % _ALIGNMENT)


def to_framework(array: Array, like: BufferView) -> Any:
    """Return `array` as an array of the framework and on the device of `like`.

    The caller must not use `array` any more: the framework takes its memory over if it can, see
    `Framework.takes_over`.
    """
    return _TO_FRAMEWORK[like.framework](array, like)


def commit_out(out: BufferView) -> Any:
    """Finish a write into `out.array`, and return the caller's `out`.

    A view that is a copy is copied back. PyTorch is told that the tensor changed, so that autograd
    notices if an older value was saved.
    """
    return _COMMIT_OUT[out.framework](out)
