"""New memory on the host."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import DType

_ALIGNMENT: Final = 64  # JAX takes over memory of this alignment and copies any other
_BYTE: Final = np.dtype(np.uint8)
_from_buffer: Final[Callable[[Any], ctypes.c_char]] = ctypes.c_char.from_buffer


def allocate(shape: tuple[int, ...], dtype: DType) -> Array:
    """Return new uninitialised memory, C-contiguous and aligned to 64 bytes."""
    memory = np.empty(math.prod(shape) * dtype.itemsize + _ALIGNMENT, _BYTE)
    return np.ndarray(shape, dtype, memory, -ctypes.addressof(_from_buffer(memory)) % _ALIGNMENT)


def use_large_pages(address: int, nbytes: int) -> None:
    """Have the system take large pages for new memory, if it can."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(address + nbytes - start), advice
        )
