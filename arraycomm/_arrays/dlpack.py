"""DLPack capsules and NumPy's array interfaces, read by ctypes as NumPy arrays.

`numpy.from_dlpack` does not do: it has no bfloat16 and float8, drops the IS_COPIED flag, and trusts
the producer. Here, everything that can be checked without touching the memory is checked, so that a
malformed array raises an exception.

Sources: the DLPack header, https://github.com/dmlc/dlpack/blob/main/include/dlpack/dlpack.h, and
NumPy's array interface, https://numpy.org/doc/stable/reference/arrays.interface.html.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._dtypes import BY_DLPACK, TABLE, DType
from arraycomm._errors import raise_interrupt, text_of

HOST: Final = frozenset((1, 3, 11))  # kDLCPU and the pinned host memory of CUDA and ROCm
CUDA: Final = frozenset((2, 10, 13))  # kDLCUDA, kDLROCM, kDLCUDAManaged: CuPy's devices
CPU_DEVICE: Final = (1, 0)  # what DLPack calls the host
_MAJOR: Final = 1
READ_ONLY: Final = 1
_IS_COPIED: Final = 2
_MAX_NDIM: Final = 64  # NumPy's own limit
_MAX_BYTES: Final = 1 << 57  # no processor maps more than this
_MAX_ADDRESS: Final = (1 << 63) - 1

# Keywords to try in turn: an old producer raises TypeError for a keyword that it does not know.
_AS_IS: Final[tuple[dict[str, Any], ...]] = ({"max_version": (_MAJOR, 0)}, {})
_TO_HOST: Final[tuple[dict[str, Any], ...]] = (
    {"max_version": (_MAJOR, 0), "dl_device": CPU_DEVICE, "copy": True},
    {"dl_device": CPU_DEVICE, "copy": True},
    {"dl_device": CPU_DEVICE},
)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


class _ArrayInterface(ctypes.Structure):
    _fields_ = (
        ("two", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("kind", ctypes.c_char),
        ("itemsize", ctypes.c_int),
        ("flags", ctypes.c_int),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("data", ctypes.c_void_p),
    )


# An index makes function objects of our own. An attribute would share them, and their prototypes,
# with every other user of ctypes.pythonapi.
_is_valid = ctypes.pythonapi["PyCapsule_IsValid"]
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_get_pointer = ctypes.pythonapi["PyCapsule_GetPointer"]
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class Foreign(NamedTuple):
    """A producer's memory on the host, and whether it is a copy."""

    array: np.ndarray[Any, Any]
    copied: bool


class Memory:
    """Memory for `np.asarray`, whose array keeps the memory's owner alive."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def attribute(x: Any, name: str, label: str) -> Any:
    """Return an attribute of `x`, None if it has none."""
    try:
        return getattr(x, name, None)
    except Exception as error:
        raise_interrupt(error, MemoryError)
        raise BufferError(f"{label}.{name} raised {describe(error)}") from error


def offered(x: Any, name: str = "__dlpack__") -> bool:
    """Return whether `x` has an attribute; if that raises instead, who reads `x` tells it.

    A class has the attributes of its instances, and offers none.
    """
    with suppress(BufferError):
        return not isinstance(x, type) and attribute(x, name, "x") is not None
    return False


def device_of(x: Any, label: str) -> tuple[int, int]:
    """Return `x.__dlpack_device__()`, checked to be a pair of integers."""
    try:
        kind, index = x.__dlpack_device__()
        # Paddle gives no index of the host.
        return operator.index(kind), 0 if index is None else operator.index(index)
    except Exception as error:
        raise_interrupt(error, MemoryError)
        raise BufferError(
            f"{label}.__dlpack_device__() must return (device type, device id); "
            f"it raised {describe(error)}"
        ) from error


def read(x: Any, device: tuple[int, int], label: str) -> Foreign:
    """Return the elements of `x` as host memory, by its `__dlpack__`.

    If `x` is not on the host, its `__dlpack__` is asked for a copy there.
    """
    capsule = request(x, _AS_IS if device[0] in HOST else _TO_HOST, label)
    # The capsule is not marked as used: its own destructor calls the producer's deleter, when the
    # last array over the memory is deleted. The producer is kept alive too, because another
    # consumer may use the capsule if the producer returns the same one twice.
    tensor, flags = open_capsule(capsule, label)
    return _from_tensor(tensor, flags, (capsule, x), label)


def request(x: Any, keyword_fallbacks: tuple[dict[str, Any], ...], label: str) -> Any:
    """Call `x.__dlpack__` with the first of these sets of keywords that it accepts."""
    # No error is kept in a variable: its traceback has this frame, and with it the array.
    for keywords in keyword_fallbacks:
        try:
            return x.__dlpack__(**keywords)
        except Exception as error:
            raise_interrupt(error, MemoryError)
            if isinstance(error, TypeError) and keywords is not keyword_fallbacks[-1]:
                continue
            raise BufferError(f"{label}.__dlpack__() raised {describe(error)}") from error
    raise AssertionError("there are keywords to try")


def open_capsule(capsule: Any, label: str) -> tuple[Any, int]:
    """Return the tensor in a capsule, and its flags."""
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if managed.major != _MAJOR:
            raise BufferError(
                f"{label}.__dlpack__() returned DLPack version {managed.major}.{managed.minor}; "
                f"only {_MAJOR}.x can be read"
            )
        return managed.tensor, managed.flags
    if _is_valid(capsule, b"dltensor"):
        # An unversioned capsule has no read-only flag; NumPy takes such memory as read-only too.
        return _DLTensor.from_address(_get_pointer(capsule, b"dltensor")), READ_ONLY
    raise _not_a_capsule(capsule, label)


def _not_a_capsule(capsule: Any, label: str) -> BufferError:
    if _is_valid(capsule, b"used_dltensor") or _is_valid(capsule, b"used_dltensor_versioned"):
        return BufferError(
            f"{label}.__dlpack__() returned a capsule that was already used; "
            "it must return a new one each time"
        )
    return BufferError(
        f"{label}.__dlpack__() must return a DLPack capsule; got {type(capsule).__name__}"
        + (" of another name" if type(capsule).__name__ == "PyCapsule" else "")
    )


def _from_tensor(tensor: Any, flags: int, owner: object, label: str) -> Foreign:
    if tensor.device_type not in HOST:
        raise BufferError(
            f"{label}.__dlpack__() returned memory of device type {tensor.device_type}, which is "
            "not the host's; move the array to the host first"
        )
    shape = integers(tensor.shape, tensor.ndim, f"{label}.__dlpack__()", "shape")
    dtype = dtype_of(tensor, label)
    strides = None
    if tensor.strides:
        counts = integers(tensor.strides, tensor.ndim, f"{label}.__dlpack__()", "strides")
        strides = tuple(count * dtype.itemsize for count in counts)
    address = (tensor.data or 0) + tensor.byte_offset
    if tensor.data and address % dtype.alignment and math.prod(shape):
        raise BufferError(
            f"{label}.__dlpack__() returned memory at {address:#x}, which is misaligned for {dtype}"
        )
    readonly = bool(flags & READ_ONLY)
    array = array_at(address if tensor.data else 0, shape, strides, dtype, readonly, owner, label)
    return Foreign(array, bool(flags & _IS_COPIED))


def integers(pointer: Any, ndim: int, label: str, what: str) -> tuple[int, ...]:
    """Return the integers of a tensor's shape or strides."""
    if not 0 <= ndim <= _MAX_NDIM:
        raise BufferError(f"{label} has {ndim} dimensions; 0 to {_MAX_NDIM} are possible")
    if ndim and not pointer:
        raise BufferError(f"{label} has {ndim} dimensions, but its {what} is a null pointer")
    return tuple(pointer[:ndim]) if ndim else ()


def dtype_of(tensor: Any, label: str) -> DType:
    """Return the dtype of a tensor."""
    if tensor.lanes != 1:
        raise TypeError(
            f"{label} has a DLPack dtype of {tensor.lanes} lanes; only dtypes of one lane are read"
        )
    row = BY_DLPACK.get((tensor.code, tensor.bits))
    if row is None:
        raise TypeError(
            f"{label} has the DLPack dtype of code {tensor.code} with {tensor.bits} bits, which is "
            f"not supported; cast to one of {', '.join(row.name for row in TABLE)}"
        )
    return row.dtype


def array_at(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    dtype: DType,
    readonly: bool,
    owner: object,
    label: str,
) -> np.ndarray[Any, Any]:
    """Return the memory at `address` as an array that keeps `owner` alive.

    Raises `BufferError` if no array can have this shape, address or these strides (in bytes).
    """
    shape = tuple(shape)
    check_extent(address, shape, strides, dtype.itemsize, label)
    if not math.prod(shape):
        empty = np.empty(shape, dtype)
        empty.flags.writeable = not readonly
        return empty
    # Untyped bytes, because bfloat16 and float8 have no type string.
    interface = {
        "version": 3,
        "shape": shape,
        "typestr": f"|V{dtype.itemsize}",
        "data": (address, readonly),
        "strides": None if strides is None else tuple(strides),
    }
    return np.asarray(Memory(interface, owner)).view(dtype)


def check_extent(
    address: int, shape: tuple[int, ...], strides: Sequence[int] | None, itemsize: int, label: str
) -> None:
    """Raise unless every element has an address."""
    if len(shape) > _MAX_NDIM or any(length < 0 for length in shape):
        raise BufferError(f"{label} has the shape {shape}, which no array can have")
    # Like NumPy, ignore lengths of 0 in the check for overflow.
    if math.prod(length or 1 for length in shape) * max(itemsize, 1) > _MAX_BYTES:
        raise BufferError(f"{label} has the shape {shape}, which overflows the address space")
    if not math.prod(shape):
        return
    if not address:
        raise BufferError(f"{label} has the shape {shape}, but its data is a null pointer")
    if strides is None:
        low, high = 0, math.prod(shape) * itemsize
    else:
        reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
        low = sum(r for r in reach if r < 0)
        high = sum(r for r in reach if r > 0) + itemsize
    if address + low <= 0 or address + high > _MAX_ADDRESS or high - low > _MAX_BYTES:
        raise BufferError(f"{label} has strides {strides} that leave the address space")


def from_array_struct(capsule: Any, owner: object, label: str) -> np.ndarray[Any, Any]:
    """Return the memory that an `__array_struct__` capsule describes as an array."""
    label = f"{label}.__array_struct__"
    if not _is_valid(capsule, None):
        raise BufferError(f"{label} must be an unnamed capsule; got {type(capsule).__name__}")
    info = _ArrayInterface.from_address(_get_pointer(capsule, None))
    if info.two != 2:
        raise BufferError(f"{label} must begin with the integer 2; got {info.two}")
    shape = integers(info.shape, info.ndim, label, "shape")
    strides = integers(info.strides, info.ndim, label, "strides") if info.strides else None
    order = "=" if info.flags & 0x200 else (">" if np.little_endian else "<")
    width = info.itemsize // 4 if info.kind == b"U" else info.itemsize
    dtype = parse_dtype(f"{order}{info.kind.decode('latin-1')}{width}", None, label)
    readonly = not info.flags & 0x400
    return array_at(info.data or 0, shape, strides, dtype, readonly, (capsule, owner), label)


def from_array_interface(interface: Any, owner: Any, label: str) -> np.ndarray[Any, Any]:
    """Return the memory that an `__array_interface__` dict describes as an array."""
    label = f"{label}.__array_interface__"
    if not isinstance(interface, dict):
        raise BufferError(f"{label} must be a dict; got {type(interface).__name__}")
    if interface.get("version") != 3:
        raise BufferError(f"{label} must have version 3; got {interface.get('version')!r}")
    check_unmasked(interface, label)
    shape = tuple_of_integers(interface.get("shape"), f"{label}['shape']")
    dtype = parse_dtype(interface.get("typestr"), interface.get("descr"), label)
    strides = interface.get("strides")
    if strides is not None:
        strides = tuple_of_integers(strides, f"{label}['strides']")
        if len(strides) != len(shape):
            raise BufferError(f"{label} has shape {shape} but strides {strides}")
    data = interface.get("data")
    if isinstance(data, tuple):
        address, readonly = address_of(data, label)
        return array_at(address, shape, strides, dtype, readonly, owner, label)
    buffer = owner if data is None else data
    return _over_buffer(buffer, interface.get("offset", 0), shape, strides, dtype, label)


def check_unmasked(interface: dict[str, Any], label: str) -> None:
    """Raise `TypeError` for an array interface with a mask, because results have no masks."""
    if interface.get("mask") is not None:
        raise TypeError(f"{label} has a mask, which would be lost; fill the masked elements first")


def parse_dtype(typestr: Any, descr: Any, label: str) -> DType:
    """Return the dtype that an array interface's type string and field list describe."""
    try:
        dtype = np.dtype(typestr) if isinstance(typestr, str) else None
        if dtype is not None and dtype.kind == "V" and descr and descr != [("", typestr)]:
            fields = np.dtype(descr)
            dtype = fields if fields.itemsize == dtype.itemsize else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or not dtype.itemsize:
        raise BufferError(f"{label} must have a type string such as '<f4'; got {typestr!r}")
    if dtype.hasobject:
        raise TypeError(f"{label} holds Python objects; use bcast_object or allgather_object")
    return dtype


def tuple_of_integers(value: Any, label: str) -> tuple[int, ...]:
    """Return `value` if it is a tuple of integers, else raise."""
    if not isinstance(value, tuple):
        raise BufferError(f"{label} must be a tuple of integers; got {type(value).__name__}")
    try:
        return tuple(operator.index(item) for item in value)
    except TypeError:
        raise BufferError(f"{label} must be a tuple of integers; got {value!r}") from None


def address_of(data: tuple[Any, ...], label: str) -> tuple[int, bool]:
    """Return the address and the read-only flag of an interface."""
    if len(data) != 2:
        raise BufferError(f"{label}['data'] must be (address, read-only); got {data!r}")
    try:
        address = operator.index(data[0])
    except TypeError:
        raise BufferError(f"{label}['data'] must begin with an address; got {data[0]!r}") from None
    if not 0 <= address <= _MAX_ADDRESS:
        raise BufferError(f"{label}['data'] must begin with an address; got {address:#x}")
    return address, bool(data[1])


def _over_buffer(
    buffer: Any,
    offset: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: DType,
    label: str,
) -> np.ndarray[Any, Any]:
    check_extent(1, shape, None, dtype.itemsize, label)
    if not isinstance(offset, int) or offset < 0:
        raise BufferError(f"{label}['offset'] must be a number of bytes; got {offset!r}")
    try:  # NumPy checks that shape and strides stay inside the buffer
        return np.ndarray(shape, dtype, memoryview(buffer), offset, strides)
    except (TypeError, ValueError, OverflowError) as error:
        raise BufferError(f"{label} does not fit its buffer: {error}") from error


def describe(error: BaseException) -> str:
    """Return an exception's type and message on one line."""
    return f"{type(error).__name__}: {text_of(error)}".rstrip(": ")
