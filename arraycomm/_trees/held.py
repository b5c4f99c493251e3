"""The leaves of a tree, held by the native part, and where they lie in the shared segment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple, Self

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import DType
from arraycomm._folds.in_c import number_of
from arraycomm._native import compiled
from arraycomm._reduce.segment import ChunkTask, SharedSegment, Targets
from arraycomm._transports.base import Bytes, Steps
from arraycomm._trees.buffers import BYTE
from arraycomm._trees.layout import ALIGNMENT, RESULTS, Chunk, Part


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


# A part of a leaf with this many bytes is folded from where it lies, along a chain of nodes.
_PIECE: Final = 16 << 10


class ChunkLayout:
    """Where the leaves of one chunk lie in the shared segment; the same in every call."""

    def __init__(self, chunk: Chunk, segment: SharedSegment, number: int) -> None:
        self.dtype, self.span = chunk.dtype, slice(chunk.start, chunk.stop)
        self._parts = chunk.parts
        rows = segment.rows[number, :, : chunk.stop - chunk.start]
        self._own_row = rows[segment.control.rank]
        # Every rank's row, as elements of the chunk.
        self.rows = list(rows.view(chunk.dtype))
        itemsize = chunk.dtype.itemsize
        own = segment.own(len(self.rows[0]))
        start, stop = own.start * itemsize, own.stop * itemsize
        # Of what lies in the chunk, what this rank folds, and what others fold.
        mine = list(_between(start, stop, chunk.parts))
        others = [*_between(0, start, chunk.parts), *_between(stop, rows.shape[1], chunk.parts)]
        self._pieces: list[tuple[slice, Part | None]] | None = None
        if segment.chained:
            self._pieces = list(_pieces(own, filter(_is_piece, mine), itemsize))
            mine = [part for part in mine if not _is_piece(part)]
        self._own, self._others = table_of(mine), table_of(others)
        self._filled = np.concatenate([self._others, self._own])

    def tables(self, over: frozenset[int]) -> tuple[DType, int, list[Array]]:
        """Return the chunk's dtype and bytes, and its parts: others' folds, own folds, results."""
        nbytes = self.span.stop - self.span.start
        return self.dtype, nbytes, [self._others, self._own, table_of(self._results(over))]

    def task(self, held: Held, buffer: Bytes, over: frozenset[int]) -> ChunkTask:
        """Return the chunk of one call, whose turns are made in Python."""
        pieces = (
            None
            if self._pieces is None
            else [
                (own, part and held.flat(part.leaf)[part.first : part.last].view(self.dtype))
                for own, part in self._pieces
            ]
        )
        return ChunkTask(
            partial(held.fill, self._own_row, self._filled),
            self.dtype,
            self.rows,
            partial(self.targets, held, buffer, over),
            pieces,
        )

    def targets(self, held: Held, buffer: Bytes, over: frozenset[int]) -> Targets:
        """Yield where results go: over the leaves in `over`, and those of others to the buffer."""
        for leaf, first, last, at in self._results(over):
            memory, itemsize = buffer if leaf == RESULTS else held.flat(leaf), self.dtype.itemsize
            start, stop = at // itemsize, (at + last - first) // itemsize
            yield slice(start, stop), memory[first:last].view(self.dtype)

    def _results(self, over: frozenset[int]) -> Iterator[Part]:
        base, end, done = self.span.start, self.span.stop - self.span.start, 0
        for part in self._parts:
            if part.leaf not in over:
                continue
            if part.at > done:
                yield Part(RESULTS, base + done, base + part.at, done)
            yield part
            # Nothing reads the gap behind a leaf.
            done = part.at + part.last - part.first + -part.last % ALIGNMENT
        if done < end:
            yield Part(RESULTS, base + done, base + end, done)


def _is_piece(part: Part) -> bool:
    """Return whether a part is folded in less time by itself than after a copy to the others."""
    return part.last - part.first >= _PIECE


def _pieces(
    own: slice, parts: Iterable[Part], itemsize: int
) -> Iterator[tuple[slice, Part | None]]:
    """Cut a rank's part of a chunk into these parts of leaves, and what lies between them."""
    done = own.start
    for part in parts:
        start, stop = part.at // itemsize, (part.at + part.last - part.first) // itemsize
        if start > done:
            yield slice(done, start), None
        yield slice(start, stop), part
        done = stop
    if done < own.stop:
        yield slice(done, own.stop), None


def _between(start: int, stop: int, parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts of leaves that lie between two bytes of a chunk."""
    for leaf, first, last, at in parts:
        begin, end = max(start, at), min(stop, at + last - first)
        if begin < end:
            yield Part(leaf, first + begin - at, first + end - at, begin)
