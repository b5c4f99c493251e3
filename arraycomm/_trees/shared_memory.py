"""Where the leaves of trees lie in the shared segment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import DType
from arraycomm._reduce.segment import ChunkTask, SharedSegment, Targets
from arraycomm._transports.base import Bytes
from arraycomm._trees.held import Held, table_of
from arraycomm._trees.layout import ALIGNMENT, RESULTS, Chunk, Part, Spec

# A part of a leaf with so many bytes is folded from where it lies, along a chain of nodes.
_PIECE: Final = 16 << 10


class ChunkLayout:
    """Where the leaves of one chunk lie in the shared segment; the same in every call.

    Attributes
    ----------
    span : slice
        Where the chunk lies among all buckets.
    rows : list of ndarray
        Every rank's row as elements of the chunk.
    leaves : list of (int, ndarray)
        The leaves that lie in the chunk as a whole, and their parts of this rank's row.
    ends : list of (int, slice, ndarray)
        The same for leaves that are cut: which of their bytes lie where.
    """

    def __init__(
        self, chunk: Chunk, segment: SharedSegment, number: int, specs: tuple[Spec, ...]
    ) -> None:
        self.dtype, self.span = chunk.dtype, slice(chunk.start, chunk.stop)
        self._parts = chunk.parts
        rows = segment.rows[number, :, : chunk.stop - chunk.start]
        self._own_row = rows[segment.control.rank]
        self.rows = list(rows.view(chunk.dtype))
        itemsize = chunk.dtype.itemsize
        own = segment.own(len(self.rows[0]))
        start, stop = own.start * itemsize, own.stop * itemsize
        # Of what lies in the chunk, what this rank folds, and what others fold.
        mine = list(_between(start, stop, chunk.parts))
        others = [*_between(0, start, chunk.parts), *_between(stop, rows.shape[1], chunk.parts)]
        self._pieces: list[tuple[slice, Part | None]] = []
        if segment.chained:
            others += [part for part in mine if not _is_piece(part)]
            self._pieces = list(_pieces(own, filter(_is_piece, mine), itemsize))
        self._own, self._others = table_of(mine), table_of(others)
        self.leaves: list[tuple[int, Array]] = []
        self.ends: list[tuple[int, slice, Bytes]] = []
        for leaf, first, last, at in chunk.parts:
            dtype, shape = specs[leaf]
            part = self._own_row[at : at + last - first]
            if last - first == math.prod(shape) * dtype.itemsize:
                self.leaves.append((leaf, part.view(dtype).reshape(shape)))
            else:
                self.ends.append((leaf, slice(first, last), part))

    def chunk_task(
        self,
        arrays: Sequence[Array | None],
        flats: Mapping[int, Bytes | None],
        buffer: Bytes,
        over: frozenset[int],
    ) -> ChunkTask:
        """Return the chunk of one call, with these leaves; the results of some go over them."""
        targets = partial(self.targets, flats, buffer, over)
        return ChunkTask(partial(self.fill, arrays, flats), self.dtype, self.rows, targets)

    def tables(self, over: frozenset[int]) -> tuple[DType, int, list[Array]]:
        """Return the chunk's dtype and bytes, and its parts: others' folds, own folds, results."""
        nbytes = self.span.stop - self.span.start
        return self.dtype, nbytes, [self._others, self._own, table_of(self._results(over))]

    def held_task(
        self, held: Held, flats: Mapping[int, Bytes | None], buffer: Bytes, over: frozenset[int]
    ) -> ChunkTask:
        """Return the chunk of one call along a chain of nodes, with leaves whose memory is held."""
        pieces = [(own, part and held.part(part).view(self.dtype)) for own, part in self._pieces]
        return ChunkTask(
            partial(held.fill, self._own_row, self._others),
            self.dtype,
            self.rows,
            partial(self.targets, flats, buffer, over),
            pieces,
        )

    def targets(
        self, flats: Mapping[int, Bytes | None], buffer: Bytes, over: frozenset[int]
    ) -> Targets:
        """Yield where results go: over the leaves in `over`, and those of others to the buffer."""
        for leaf, first, last, at in self._results(over):
            memory, itemsize = buffer if leaf == RESULTS else flats[leaf], self.dtype.itemsize
            assert memory is not None
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

    def fill(self, arrays: Sequence[Array | None], flats: Mapping[int, Bytes | None]) -> None:
        """Copy the leaves' parts into this rank's row; None stands for zeros."""
        for leaf, into in self.leaves:
            array = arrays[leaf]
            into[...] = 0 if array is None else array
        for leaf, part, into in self.ends:
            flat = flats[leaf]
            into[...] = 0 if flat is None else flat[part]


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
