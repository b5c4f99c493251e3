"""Where the leaves of trees lie in the shared segment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from arraycomm._arrays.buffer import Array
from arraycomm._collectives.segment import ChunkTask, SharedSegment, Targets
from arraycomm._dtypes import DType
from arraycomm._transports.base import Bytes
from arraycomm._trees.buffers import BYTE
from arraycomm._trees.held import Held, table_of
from arraycomm._trees.layout import ALIGNMENT, Chunk, Part, Spec


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
        self._bytes, self._rank = list(rows), segment.control.rank
        self.rows = list(rows.view(chunk.dtype))
        itemsize = chunk.dtype.itemsize
        self._folds = segment.folds_leaves
        own = segment.own(len(self.rows[0])) if self._folds else slice(0, 0)
        start, stop = own.start * itemsize, own.stop * itemsize
        # Of what lies in the chunk, what this rank folds, and what others fold.
        self._own = table_of(_between(start, stop, chunk.parts))
        others = _between(0, start, chunk.parts), _between(stop, rows.shape[1], chunk.parts)
        self._others = table_of(chain(*others))
        self.leaves: list[tuple[int, Array]] = []
        self.ends: list[tuple[int, slice, Bytes]] = []
        own_row = rows[segment.control.rank]
        for leaf, first, last, at in chunk.parts:
            dtype, shape = specs[leaf]
            part = own_row[at : at + last - first]
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
        return ChunkTask(lambda _: self.fill(arrays, flats), self.dtype, self.rows, targets)

    def tables(self) -> tuple[DType, slice, Array, Array]:
        """Return where the chunk lies, and its parts that others fold and that this rank folds."""
        return self.dtype, self.span, self._others, self._own

    def held_task(self, held: Held, buffer: Bytes) -> ChunkTask:
        """Return the chunk of one call, with leaves whose memory is held; its results go to the buffer."""
        into = buffer[self.span]
        return ChunkTask(
            lambda streams: held.fill(self._bytes[self._rank], self._others, streams=streams),
            self.dtype,
            self.rows,
            lambda: [(slice(None), into.view(self.dtype))],
            partial(self._fold, held) if self._folds else None,
        )

    def _fold(self, held: Held, op: str, folded: Array) -> None:
        held.fold(op, self.dtype, self._bytes, self._rank, self._own, folded.view(BYTE))

    def targets(
        self, flats: Mapping[int, Bytes | None], buffer: Bytes, over: frozenset[int]
    ) -> Targets:
        """Yield where results go: over the leaves in `over`, and those of others to the buffer."""
        slots, itemsize, done = buffer[self.span].view(self.dtype), self.dtype.itemsize, 0
        for leaf, first, last, at in self._parts:
            flat = flats[leaf] if leaf in over else None
            if flat is None:
                continue
            start, stop = at // itemsize, (at + last - first) // itemsize
            if start > done:
                yield slice(done, start), slots[done:start]
            yield slice(start, stop), flat[first:last].view(self.dtype)
            # Nothing reads the gap behind a leaf.
            done = (at + last - first + -last % ALIGNMENT) // itemsize
        if done < len(slots):
            yield slice(done, None), slots[done:]

    def fill(self, arrays: Sequence[Array | None], flats: Mapping[int, Bytes | None]) -> None:
        """Copy the leaves' parts into this rank's row; None stands for zeros."""
        for leaf, into in self.leaves:
            array = arrays[leaf]
            into[...] = 0 if array is None else array
        for leaf, part, into in self.ends:
            flat = flats[leaf]
            into[...] = 0 if flat is None else flat[part]


def _between(start: int, stop: int, parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts of leaves that lie between two bytes of a chunk."""
    for leaf, first, last, at in parts:
        begin, end = max(start, at), min(stop, at + last - first)
        if begin < end:
            yield Part(leaf, first + begin - at, first + end - at, begin)
