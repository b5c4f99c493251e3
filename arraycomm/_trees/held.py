"""The leaves of a tree; the native part holds their memory, and copies many in one call."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import DType
from arraycomm._folds.in_c import number_of
from arraycomm._native import compiled
from arraycomm._reduce.segment import SharedSegment
from arraycomm._transports.base import Bytes, Steps
from arraycomm._trees.buffers import BYTE
from arraycomm._trees.layout import Part


class Held:
    """The memory of contiguous NumPy arrays, which keeps its place until this object is gone."""

    def __init__(self, arrays: list[Any], leaves: Any = None) -> None:
        self.arrays, self._leaves = arrays, leaves
        self.native = leaves is not None

    def flat(self, leaf: int) -> Bytes:
        """Return the bytes of a leaf."""
        flat: Bytes = self.arrays[leaf].reshape(-1).view(BYTE)
        return flat

    def fill(self, row: Bytes, parts: Array) -> None:
        """Copy parts of the leaves, a table of `table_of`, into a row."""
        if self.native:
            self._leaves.fill(row, parts)
            return
        for leaf, first, nbytes, at in parts.tolist():
            row[at : at + nbytes] = self.flat(leaf)[first : first + nbytes]

    def reduce(self, segment: SharedSegment, tables: ChunkTables, target: Bytes) -> Steps:
        """Reduce the leaves through a segment, of which the native part makes all turns.

        Leaves may lie in `target` where their results do. Those over which results are written
        overlap nothing else.
        """
        tree, chunk = tables.chunks, segment.chunk_bytes
        yield from segment.reduce_natively(
            lambda place: self._leaves.reduce(place, tree, tables.parts, chunk, target.nbytes),
            target,
            len(tree),
            0,
        )


class ChunkTables(NamedTuple):
    """Where a tree's chunks and their parts lie.

    A chunk's row has its bytes, its fold, and the bounds of its parts of each kind: those that
    others fold, those that this rank folds, and those for results.
    """

    chunks: Array
    parts: Array

    @classmethod
    def of(cls, chunks: Iterable[tuple[DType, int, list[Array]]], op: str) -> Self:
        """Return the tables of chunks, each with its dtype, its bytes, and its parts by kind."""
        rows, parts, end = list[tuple[int, ...]](), list[Array](), 0
        for dtype, nbytes, kinds in chunks:
            *starts, last = accumulate(map(len, kinds), initial=end)
            rows.append((nbytes, number_of(op, dtype), *starts, last))
            parts += kinds
            end = last
        everything = np.concatenate([np.empty((0, 4), np.int64), *parts])
        return cls(np.array(rows, np.int64).reshape(-1, 6), everything)


def hold(
    arrays: list[Any], dtypes: tuple[DType, ...], shapes: tuple[tuple[int, ...], ...]
) -> Held | None:
    """Return arrays held by the native part, if they have these very dtypes, and these shapes."""
    leaves = None if compiled is None else compiled.hold(np.ndarray, arrays, dtypes, shapes)
    return None if leaves is None else Held(arrays, leaves)


def table_of(parts: Iterable[Part]) -> Array:
    """Return a row for each part: its leaf, its first byte there, its length, where it begins."""
    rows = [(leaf, first, last - first, at) for leaf, first, last, at in parts]
    return np.array(rows, np.int64).reshape(-1, 4)
