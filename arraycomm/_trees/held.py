"""The leaves of a tree, held by the native part, which copies and folds many of them in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import DType
from arraycomm._folds.in_c import number_of
from arraycomm._native import compiled
from arraycomm._transports.base import Bytes
from arraycomm._trees.layout import Part, Spec


class Held:
    """The memory of NumPy arrays, which stays theirs and keeps its place until this object is gone.

    Parts are a table of `table_of`. `out` overlaps none of the `arrays`.
    """

    def __init__(self, leaves: Any, arrays: list[Any]) -> None:
        self._leaves, self.arrays = leaves, arrays

    def fill(self, row: Bytes, parts: Array, *, streams: bool) -> None:
        """Copy parts of the leaves into a row, past the caches if it `streams`."""
        self._leaves.fill(row, parts, streams)

    def fold(
        self, op: str, dtype: DType, rows: Sequence[Bytes], own: int, parts: Array, out: Bytes
    ) -> None:
        """Fold parts of all rows into the same parts of `out`; row `own` is that of the leaves."""
        self._leaves.fold(number_of(op, dtype), rows, own, parts, out)


def hold(specs: Sequence[Spec]) -> Callable[[list[Any]], Held | None]:
    """Return what holds a list of arrays of these dtypes and shapes; for others it returns None."""
    dtypes, shapes = tuple(dtype for dtype, _ in specs), tuple(shape for _, shape in specs)

    def held(arrays: list[Any]) -> Held | None:
        if compiled is None:
            return None
        leaves = compiled.hold(np.ndarray, arrays, dtypes, shapes)
        return None if leaves is None else Held(leaves, arrays)

    return held


def table_of(parts: Iterable[Part]) -> Array:
    """Return a row for each part: its leaf, its first byte there, its length, and where it begins."""
    rows = [(leaf, first, last - first, at) for leaf, first, last, at in parts]
    return np.array(rows, np.int64).reshape(-1, 4)
