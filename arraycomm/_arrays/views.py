"""Any array as host memory: the one door through which arrays enter.

A framework is known by the top-level module of the array's type, and is never imported from here:
whoever holds an array of it has done that. What no framework claims is read by the protocols.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from arraycomm._arrays import frameworks
from arraycomm._arrays.buffer import CPU, Array, BufferView, Device, Reader, to_native, type_name
from arraycomm._arrays.protocols import read_foreign
from arraycomm._dtypes import BY_DTYPE, DType, name_of


def view(x: Any, operation: str, name: str = "x") -> BufferView:
    """Return `x` as host memory, without a copy wherever it is host memory already.

    Raises `TypeError`, `ValueError`, `OverflowError` or `BufferError` that names `operation`, and `x`
    by the name that it has there.
    """
    return (_READERS.get(type(x)) or _reader_of(type(x)))(x, operation, name)


def view_out(out: Any, shape: tuple[int, ...], dtype: DType, operation: str) -> BufferView:
    """Return `out` as memory to write a result of this shape and dtype into.

    Raises `ValueError` for another shape, `TypeError` for another dtype or no array at all, and
    `BufferError` where `out` cannot be written.
    """
    found = reader_of(out)(out, operation, "out")
    if found.framework in {"python", "numpy_scalar"}:
        raise TypeError(f"{operation}: out must be an array; got {type(out).__name__}")
    if found.framework == "jax":
        raise BufferError(
            f"{operation}: out is a JAX array, which is immutable; use the result instead of out"
        )
    check_out(found, shape, dtype, operation)
    return _writable(found, operation)


def check_out(found: BufferView, shape: tuple[int, ...], dtype: DType, operation: str) -> None:
    """Raise unless `out` has the shape and the dtype of the result."""
    if found.shape != shape:
        raise ValueError(f"{operation}: out must have the shape {shape}; got {found.shape}")
    if found.dtype != dtype:
        raise TypeError(
            f"{operation}: out must have dtype {name_of(dtype)}; got {name_of(found.dtype)}"
        )


def reader_of(x: Any) -> Reader:
    """Return what reads arrays of this type."""
    return _READERS.get(type(x)) or _reader_of(type(x))


def result_prototype(x: Any, operation: str, name: str) -> BufferView:
    """Return a view of `x` that tells framework and device, with `NOTHING` for elements.

    It does what `like` needs without a copy from a device, and takes tensors that require
    gradients, since nothing of theirs is read. Where only reading tells, it is the whole view.
    """
    reader = reader_of(x)
    place = _PLACES.get(reader)
    if place is None:
        return reader(x, operation, name)
    return BufferView(NOTHING, place[0], x, True, True, place[1](x))


def check_readable(x: Any, framework: str, operation: str, name: str) -> None:
    """Raise where a tensor has a history to lose, or a JAX array no elements of its own."""
    if framework == "torch" and x.requires_grad:
        frameworks.without_history(x, operation, name)
    elif framework == "jax":
        frameworks.check_jax(x, operation, name)


def _writable(found: BufferView, operation: str) -> BufferView:
    if found.framework == "mlx":
        # Its memory may be shared with other arrays; `written` replaces the elements as a whole.
        return BufferView(np.empty(found.shape, found.dtype), "mlx", found.source, False, True)
    if found.readonly:
        raise BufferError(f"{operation}: out is read-only; pass memory that can be written")
    if _overlaps_itself(found.array):
        raise BufferError(
            f"{operation}: elements of out share memory (strides {found.strides} for shape "
            f"{found.shape}); pass an array of its own"
        )
    if found.copied and not _copies_back(found):
        raise BufferError(
            f"{operation}: out shows only a copy of its memory, and what is written there would "
            "be lost; pass an array in host memory"
        )
    return found


def _copies_back(found: BufferView) -> bool:
    return found.framework in {"torch", "cupy"} or isinstance(found.source, np.ndarray)


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


def _reader_of(kind: type) -> Reader:
    for base in kind.__mro__:
        module = str(getattr(base, "__module__", "")).partition(".")[0]
        find = _FRAMEWORKS.get(module)
        reader = find(kind) if find is not None else None
        if reader is not None:
            _READERS[kind] = reader
            return reader
    return read_foreign


# NumPy ------------------------------------------------------------------------------------------


def _find_numpy(kind: type) -> Reader | None:
    if issubclass(kind, np.ma.MaskedArray):
        return _refuse_masked
    if issubclass(kind, np.ndarray):
        return _read_numpy_subclass
    return _read_numpy_scalar if issubclass(kind, np.generic) else None


def _read_numpy(x: Any, operation: str, name: str) -> BufferView:
    if x.dtype in BY_DTYPE:
        return BufferView(x, "numpy", x, not x.flags.writeable)
    return _read_numpy_subclass(x, operation, name)


def _read_numpy_subclass(x: Any, operation: str, _name: str) -> BufferView:
    array = np.asarray(x)
    native = to_native(array, operation)
    return BufferView(native, "numpy", x, not x.flags.writeable, native is not array)


def _refuse_masked(_x: Any, operation: str, name: str) -> BufferView:
    raise TypeError(
        f"{operation}: {name} is a masked array, whose mask would be lost; "
        f"pass {name}.filled(value), or {name}.data and the mask apart"
    )


def _read_numpy_scalar(x: Any, operation: str, _name: str) -> BufferView:
    return BufferView(to_native(np.array(x), operation), "numpy_scalar", x, True, True)


# Python -----------------------------------------------------------------------------------------

_NUMBERS: Final[dict[type, type]] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}


def _find_python(kind: type) -> Reader | None:
    if issubclass(kind, tuple(_NUMBERS)):
        return _read_number
    return _refuse_object if issubclass(kind, _OBJECTS) else None


_OBJECTS: Final = (str, list, dict, tuple, set, frozenset, range, type(None), type)


def _read_number(x: Any, operation: str, name: str) -> BufferView:
    dtype: Any = next(_NUMBERS[base] for base in type(x).__mro__ if base in _NUMBERS)
    try:
        array: Array = np.array(x, dtype)
    except OverflowError:
        raise OverflowError(
            f"{operation}: {name} = {x:#x} does not fit int64; pass a float or an array"
        ) from None
    return BufferView(array, "python", x, True, True)


def _refuse_object(x: Any, operation: str, name: str) -> BufferView:
    raise TypeError(
        f"{operation}: {name} must be an array or a number; got {type_name(x)}; "
        "use bcast_object for any object, allreduce_tree or synchronize for a tree of arrays"
    )


# By the top-level module of a class in the type's ancestry: what finds the reader of the type.
_FRAMEWORKS: Final[dict[str, Callable[[type], Reader | None]]] = {
    "numpy": _find_numpy,
    "builtins": _find_python,
    "torch": frameworks.find_torch,
    "jax": frameworks.find_jax,
    "jaxlib": frameworks.find_jax,
    "cupy": frameworks.find_cupy,
    "array_api_strict": frameworks.find_strict,
    "mlx": frameworks.find_mlx,
}

# Readers of the types met so far. Types that no framework claims are not kept: ctypes and others
# make them on the fly, and this table would never let them go.
_READERS: Final[dict[type, Reader]] = {np.ndarray: _read_numpy}

NOTHING: Final = np.empty(0)

# Readers of frameworks whose arrays tell where they are without being read.
_PLACES: Final[dict[Reader, tuple[str, Callable[[Any], Device]]]] = {
    frameworks.read_torch: ("torch", frameworks.torch_device),
    frameworks.read_jax: ("jax", frameworks.jax_device),
    frameworks.read_cupy: ("cupy", frameworks.cupy_device),
    frameworks.read_mlx: ("mlx", lambda _: CPU),
}
