"""`BufferView`: one array as host memory, and what every reader of arrays uses."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._dtypes import DType, check_movable

Array: TypeAlias = np.ndarray[Any, Any]
Device: TypeAlias = tuple[str, int]

CPU: Final[Device] = ("cpu", 0)


@dataclass(slots=True, eq=False, repr=False)
class BufferView:
    """One array as host memory, and what a result like it needs."""

    # The elements in native byte order. They are the caller's own memory unless `copied`.
    array: Array
    # The name of the framework of `source`. "python" and "numpy_scalar" are numbers, "numpy_record"
    # is a record array, and "namespace" is an unknown type with an array API namespace. Other
    # objects count as "numpy".
    framework: str
    # The caller's object.
    source: Any
    # Whether the caller's memory must not be written.
    readonly: bool
    copied: bool = False
    # Where the caller's memory is.
    device: Device = CPU
    # The elements in C order on a device, if they are communicated from there.
    device_buffer: DeviceBuffer | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the dimensions."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Distances between neighbours along each dimension, in bytes."""
        return self.array.strides

    @property
    def dtype(self) -> DType:
        """NumPy's dtype of the elements, in native byte order."""
        dtype: DType = self.array.dtype
        return dtype


# Reads an array as a view. Gets the array and what messages call it.
Reader: TypeAlias = Callable[[Any, str], BufferView]


def to_native(array: Array, name: str) -> Array:
    """Return the array in native byte order: the same object if it has that already."""
    dtype = array.dtype
    # NumPy calls a structure native if only its subarrays are not.
    if not dtype.isnative or (dtype.names and dtype != dtype.newbyteorder("=")):
        array = array.astype(dtype.newbyteorder("="))
    check_movable(array.dtype, name)
    return array


def type_name(x: Any) -> str:
    """Return what messages call the type of an object."""
    if isinstance(x, type):
        return f"the class {x.__qualname__}"
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


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
