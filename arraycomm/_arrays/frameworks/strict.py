"""array-api-strict's arrays."""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, Reader
from arraycomm._arrays.frameworks.base import Framework, no_such_dtype
from arraycomm._dtypes import BY_DTYPE, check_movable

_DTYPES: Final = frozenset(
    dtype for dtype in BY_DTYPE if dtype.kind in "biufc" and dtype != np.dtype(np.float16)
)


def find_reader(kind: type) -> Reader | None:
    """Return the reader of arrays of this type."""
    return _read if hasattr(kind, "__dlpack__") else None


def _read(x: Any, name: str) -> BufferView:
    try:
        array = np.from_dlpack(x)
    except ValueError:
        # While the flags choose a version of the standard that DLPack's own versions came after.
        array = np.asarray(x)
    check_movable(array.dtype, name)
    return BufferView(array, "array_api_strict", x, not array.flags.writeable)


def _to_strict(array: Array, like: BufferView) -> Any:
    if array.dtype not in _DTYPES:
        raise no_such_dtype("array_api_strict", array.dtype)
    device = None if like.source is None else like.source.device
    return sys.modules["array_api_strict"].asarray(array, device=device, copy=False)


STRICT: Final = Framework(
    name="array_api_strict",
    module="array_api_strict",
    to_framework=_to_strict,
    takes_over=_DTYPES.__contains__,
    lacks=lambda _: frozenset(BY_DTYPE) - _DTYPES,
    takes_opaque=False,
)
