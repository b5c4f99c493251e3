"""Python's numbers, and its objects that are no arrays."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, Reader, type_name
from arraycomm._arrays.frameworks.base import Framework

_NUMBERS: Final[dict[type, type]] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}
_OBJECTS: Final = (str, list, dict, tuple, set, frozenset, range, type(None), type)


def find_reader(kind: type) -> Reader | None:
    """Return the reader of numbers of this type, or what refuses an object of Python's."""
    if issubclass(kind, tuple(_NUMBERS)):
        return _read_number
    return _refuse_object if issubclass(kind, _OBJECTS) else None


def _read_number(x: Any, name: str) -> BufferView:
    dtype: Any = next(_NUMBERS[base] for base in type(x).__mro__ if base in _NUMBERS)
    try:
        array: Array = np.array(x, dtype)
    except OverflowError:
        raise OverflowError(
            f"{name} = {x:#x} does not fit int64; pass a float or an array"
        ) from None
    return BufferView(array, "python", x, True, True)


def _refuse_object(x: Any, name: str) -> BufferView:
    raise TypeError(
        f"{name} must be an array or a number; got {type_name(x)}; "
        "numpy.asarray makes an array of numbers; a tree of arrays goes by allreduce_tree or "
        "synchronize, any object by send_object, bcast_object, gather_object or allgather_object"
    )


def _to_number(array: Array, _like: BufferView) -> Any:
    return array.item() if array.ndim == 0 else array


PYTHON: Final = Framework(name="python", to_framework=_to_number, number=True)
