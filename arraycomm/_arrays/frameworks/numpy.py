"""NumPy's arrays and scalars."""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, Reader, to_native
from arraycomm._arrays.frameworks.base import Framework, unconverted
from arraycomm._dtypes import BY_DTYPE


def find_reader(kind: type) -> Reader | None:
    """Return the reader of arrays of this type, if it is NumPy's."""
    # Only if it is loaded: it takes long.
    if issubclass(kind, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        return _refuse_masked
    if kind is np.ndarray:
        return _read_array
    if issubclass(kind, np.ndarray):
        return _read_subclass
    return _read_scalar if issubclass(kind, np.generic) else None


def _read_array(x: Any, name: str) -> BufferView:
    if x.dtype in BY_DTYPE:
        return BufferView(x, "numpy", x, not x.flags.writeable)
    return _read_subclass(x, name)


def _read_subclass(x: Any, name: str) -> BufferView:
    array, is_record = np.asarray(x), x.dtype.type is np.record
    if is_record:
        array = array.view(np.dtype((np.void, array.dtype)))
    native = to_native(array, name)
    framework = "numpy_record" if is_record else "numpy"
    return BufferView(native, framework, x, not x.flags.writeable, native is not array)


def _refuse_masked(_x: Any, name: str) -> BufferView:
    raise TypeError(
        f"{name} is a masked array, whose mask would be lost; "
        f"pass {name}.filled(value), or {name}.data and the mask apart"
    )


def _read_scalar(x: Any, name: str) -> BufferView:
    array = np.array(x)
    if isinstance(x, np.record):
        array = array.view(np.dtype((np.void, array.dtype)))
    return BufferView(to_native(array, name), "numpy_scalar", x, True, True)


def _to_scalar(array: Array, like: BufferView) -> Any:
    if isinstance(like.source, np.record):
        array = _to_record(array, like)
    return array[()] if array.ndim == 0 else array


def _to_record(array: Array, like: BufferView) -> Any:
    """Return structures whose fields are attributes too."""
    if not array.dtype.names:
        return array
    kind = np.recarray if isinstance(like.source, np.recarray) else np.ndarray
    return array.view(np.dtype((np.record, array.dtype)), kind)


def _is_already(source: BufferView, like: BufferView) -> bool:
    # Objects of no array namespace count as NumPy's, since their results are NumPy arrays.
    return unconverted(source, like) and isinstance(source.source, np.ndarray)


NUMPY: Final = Framework(
    name="numpy", module="numpy", to_framework=lambda array, _: array, is_already=_is_already
)
# Record arrays, and other arrays of records.
NUMPY_RECORD: Final = Framework(
    name="numpy_record", to_framework=_to_record, is_already=_is_already
)
NUMPY_SCALAR: Final = Framework(name="numpy_scalar", to_framework=_to_scalar, number=True)
