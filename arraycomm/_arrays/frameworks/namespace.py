"""Arrays of a type that is not known here, but that has an array API namespace."""

from __future__ import annotations

from typing import Any, Final

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._arrays.frameworks.base import Framework


def _to_namespace(array: Array, like: BufferView) -> Any:
    xp = like.source.__array_namespace__()
    try:
        return xp.from_dlpack(array)
    except (BufferError, TypeError, AttributeError, RuntimeError):
        return xp.asarray(array)


def _is_already(source: BufferView, like: BufferView) -> bool:
    return type(source.source) is type(like.source)


def _reason_to_copy(array: Array) -> str | None:
    # The namespace may not check what it is given.
    if array.flags.c_contiguous and array.flags.writeable:
        return None
    return "only writable C-contiguous memory is shared with an unknown array type"


NAMESPACE: Final = Framework(
    name="namespace",
    to_framework=_to_namespace,
    is_already=_is_already,
    reason_to_copy=_reason_to_copy,
)
