"""Layouts: the same elements placed otherwise in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def _locked(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _unaligned(array: Array) -> Array:
    raw = np.empty(array.nbytes + 1, np.uint8)[1:]
    view = np.frombuffer(raw.data, array.dtype).reshape(array.shape)
    view[...] = array
    return view


# Of an array of two dimensions or more.
LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "contiguous": lambda a: a.copy(),
    "sliced": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "rows sliced": lambda a: np.repeat(a, 3, axis=0)[::3],
    "fortran": lambda a: a.copy(order="F"),
    "negative": lambda a: a[::-1, ::-1].copy()[::-1, ::-1],
    "read-only": lambda a: _locked(a.copy()),
    "unaligned": _unaligned,
}
