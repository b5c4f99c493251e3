"""Arrays of a type that is not known here, but that has an array API namespace."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, type_name
from arraycomm._arrays.dlpack import describe
from arraycomm._arrays.frameworks.base import Framework
from arraycomm._dtypes import BY_NAME, TABLE, DType, name_of
from arraycomm._errors import raise_interrupt


def to_namespace(array: Array, like: BufferView) -> Any:
    """Return an array that the namespace of `like` makes."""
    try:
        made = _made(like.source.__array_namespace__(), array)
        _check_dtype(made, name_of(array.dtype))
        return made
    except Exception as error:
        raise_interrupt(error, MemoryError)
        raise TypeError(
            f"{type_name(like.source)} has an array namespace whose from_dlpack cannot make the "
            f"result, of dtype {name_of(array.dtype)} and shape {array.shape}: {describe(error)}; "
            "pass the array as NumPy's, such as by numpy.from_dlpack"
        ) from error


def _made(xp: Any, array: Array) -> Any:
    try:
        return xp.from_dlpack(array)
    except (BufferError, TypeError, AttributeError, RuntimeError):
        if not hasattr(xp, "asarray"):
            raise
        return xp.asarray(array)


def _check_dtype(made: Any, wanted: str) -> None:
    """Raise if a namespace has changed the dtype, as one without 64 bits may do."""
    found = str(getattr(made, "dtype", ""))
    if wanted not in found and any(name in found for name in BY_NAME):
        raise TypeError(f"it makes {found}")


def _lacks(source: Any) -> frozenset[DType]:
    return frozenset(row.dtype for row in TABLE if not _has(source, row.dtype))


def _has(source: Any, dtype: DType) -> bool:
    empty = np.empty(0, dtype)
    try:
        to_namespace(empty, BufferView(empty, "namespace", source, True))
    except TypeError:
        return False
    return True


def _is_already(source: BufferView, like: BufferView) -> bool:
    return type(source.source) is type(like.source)


def _reason_to_copy(array: Array) -> str | None:
    # The namespace may not check what it is given.
    if array.flags.c_contiguous and array.flags.writeable:
        return None
    return "only writable C-contiguous memory is shared with an unknown array type"


NAMESPACE: Final = Framework(
    name="namespace",
    to_framework=to_namespace,
    lacks=_lacks,
    is_already=_is_already,
    reason_to_copy=_reason_to_copy,
)
