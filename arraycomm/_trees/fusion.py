"""Fusion: the leaves of a tree reduced as few large messages, or through shared memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._folds import fold, goes_on
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.group import Group
from arraycomm._reduce import algorithms, chain
from arraycomm._reduce.segment import ROWS, SharedSegment, segment_of
from arraycomm._transports.base import Bytes, Steps, Transport
from arraycomm._trees.buffers import BufferPool, Packed, Sources, copy_into
from arraycomm._trees.held import ChunkLayout, ChunkTables, Held, hold, table_of
from arraycomm._trees.layout import (
    LeafSlot,
    Part,
    Spec,
    Transfer,
    cut,
    lay_out,
    slots_of,
    transfers,
)

# To write results over smaller leaves takes longer than to write them elsewhere.
LARGE: Final = 64 << 10
# Between nodes, a leaf with this many bytes for each rank is a message of its own.
_ALONE: Final = 512 << 10
_NONE: Final[frozenset[int]] = frozenset()
_MOST_TABLES: Final = 4


class Fusion:
    """Leaves of these dtypes and shapes as few messages; calls reuse its memory."""

    def __init__(self, specs: tuple[Spec, ...], bucket_bytes: int) -> None:
        self.specs = specs
        self.buckets = lay_out(specs, bucket_bytes)
        self.nbytes = sum(bucket.nbytes for bucket in self.buckets)
        self._slots = slots_of(specs, self.buckets)
        self._pool = BufferPool(self.nbytes)
        # Made when the leaves first go through the shared segment.
        self._layouts: tuple[ChunkLayout, ...] | None = None
        # By op, and by the leaves over which results are written.
        self._tables: dict[tuple[str, frozenset[int]], ChunkTables] = {}
        self._dtypes = tuple(dtype for dtype, _ in specs)
        self._shapes = tuple(shape for _, shape in specs)
        self._parts = list(map(_whole, range(len(specs)), self._slots))
        # The leaves over which results may be written.
        self.large = {part.leaf for part in self._parts if part.last >= LARGE}
        # A table of all leaves in the buffer.
        self.whole = table_of(self._parts)
        # Made when leaves first go between nodes, with what is copied for them.
        self._messages: tuple[Transfer, ...] | None = None
        self._together = self.whole

    def hold(self, arrays: list[Any]) -> Held | None:
        """Hold the leaves, if all are contiguous arrays of NumPy that need no conversion."""
        return hold(arrays, self._dtypes, self._shapes)

    def acquire(self) -> Packed:
        """Return memory for the results of one call."""
        buffer, new = self._pool.acquire()
        packed = Packed(self.buckets, self._slots, buffer)
        if new:
            packed.clear_gaps()
        return packed

    def prepare(self, memory: TreeMemory, op: str) -> Steps:
        """Return the shared segment through which the leaves travel, or None; collective."""
        group = memory.group
        if group.size == 1 or self.nbytes <= group.inline_bytes:
            return None
        transport = group.transport
        if transport.chain is None:
            return (yield from segment_of(transport))
        dtypes = {bucket.dtype for bucket in self.buckets}
        if not chain.is_preferred(transport, op, dtypes, self.nbytes):
            return None
        return (yield from chain.segment_of(transport))

    def reduce(
        self,
        memory: TreeMemory,
        packed: Packed,
        sources: Sources | Held,
        op: str,
        *,
        may_overwrite: bool = False,
    ) -> Steps:
        """Reduce the ranks' leaves into `packed`; return those whose results are in their place.

        Through shared memory each rank folds a part of every chunk for all, and copies its results
        from there. If leaves may be overwritten, results of large ones are written there instead.
        """
        if memory.group.size == 1:
            # The fold of one rank's leaves is these leaves, but for zeros in an exact sum.
            self.pack(packed, sources)
            if not goes_on(op):
                self._fold_rows([packed.split(packed.buffer.copy())], packed, op)
            return _NONE
        segment = yield from self.prepare(memory, op)
        if segment is not None:
            over = _NONE
            if may_overwrite and not isinstance(sources, Held):
                over = self._overwritable(sources)
            held, layouts = self._held(packed, sources), self._layouts_in(segment)
            if segment.chained or not held.native:
                tasks = (each.task(held, packed.buffer, over) for each in layouts)
                yield from segment.reduce(tasks, op)
                return over
            if (op, over) not in self._tables:
                if len(self._tables) == _MOST_TABLES:
                    self._tables.clear()
                self._tables[op, over] = ChunkTables.of((each.tables(over) for each in layouts), op)
            yield from held.reduce(segment, self._tables[op, over], packed.buffer)
            return over
        yield from self._reduce_messages(memory.group.transport, packed, sources, op)
        return _NONE

    def _reduce_messages(
        self, link: Transport, packed: Packed, sources: Sources | Held, op: str
    ) -> Steps:
        """Reduce large leaves from where they lie, and the others in `packed`."""
        if self._messages is None:
            self._messages = tuple(transfers(self.buckets, _ALONE * link.size))
            alone = {message.leaf for message in self._messages}
            self._together = table_of(part for part in self._parts if part.leaf not in alone)
        flats = self._flats(sources)
        if isinstance(sources, Held):
            sources.fill(packed.buffer, self._together)
        else:
            packed.pack(sources, without=flats)
        for dtype, several in groupby(self._messages, key=lambda message: message.dtype):
            pairs = []
            for _, start, stop, leaf in several:
                slot = packed.buffer[start:stop].view(dtype)
                pairs.append((slot if leaf is None else flats.get(leaf, slot), slot))
            yield from algorithms.allreduce_in_turn(link, pairs, op)

    def _flats(self, sources: Sources | Held) -> dict[int, Array]:
        """Return the leaves with a message of their own that can be sent as they are."""
        found: dict[int, Array] = {}
        for leaf in (message.leaf for message in self._messages or ()):
            if leaf is None:
                continue
            source = sources.arrays[leaf] if isinstance(sources, Held) else sources[leaf]
            array = source.array if isinstance(source, BufferView) else source
            if (
                array is not None
                and array.dtype == self.specs[leaf][0]
                and array.flags.c_contiguous
            ):
                found[leaf] = array.reshape(-1)
        return found

    def pack(self, packed: Packed, sources: Sources | Held) -> None:
        """Copy the leaves in; None stands for zeros."""
        if isinstance(sources, Held):
            sources.fill(packed.buffer, self.whole)
        else:
            packed.pack(sources)

    def _held(self, packed: Packed, sources: Sources | Held) -> Held:
        """Hold the leaves; what stands for zeros, or needs another dtype or layout, in its slot."""
        if isinstance(sources, Held):
            return sources
        arrays = [None if source is None else source.array for source in sources]
        held = self.hold(arrays)
        if held is not None:
            return held
        fitting = [
            array
            if type(array) is np.ndarray and array.dtype is dtype and array.flags.c_contiguous
            else copy_into(slot, array)
            for array, dtype, slot in zip(arrays, self._dtypes, packed.leaves(), strict=True)
        ]
        return self.hold(fitting) or Held(fitting)

    def fold_payloads(self, group: Group, packed: Packed, agreement: Agreement, op: str) -> None:
        """Fold the payloads of the ranks' headers into `packed`."""
        rows = [packed.split(agreement.payload(r, self.nbytes)) for r in range(group.size)]
        self._fold_rows(rows, packed, op)

    def _fold_rows(self, rows: Sequence[list[Bytes]], packed: Packed, op: str) -> None:
        for number, bucket in enumerate(self.buckets):
            parts = [row[number].view(bucket.dtype) for row in rows]
            fold(op, bucket.dtype, parts, packed.memory[number].view(bucket.dtype))

    def _overwritable(self, sources: Sources) -> frozenset[int]:
        """Return the large leaves over which results can be written: no other has their memory."""
        views = {leaf: view for leaf in self.large if (view := sources[leaf]) is not None}
        found = [
            leaf
            for leaf, view in views.items()
            if view.array.flags.carray
            and view.array.dtype == self.specs[leaf][0]
            and not (view.copied or view.readonly)
        ]
        return frozenset(found) if found and _are_apart(sources) else _NONE

    def _layouts_in(self, segment: SharedSegment) -> tuple[ChunkLayout, ...]:
        if self._layouts is None:
            chunks = enumerate(cut(self.buckets, segment.chunk_for(self.nbytes)))
            self._layouts = tuple(
                ChunkLayout(chunk, segment, number % ROWS) for number, chunk in chunks
            )
        return self._layouts


class TreeMemory:
    """The memory through which one communicator reduces trees."""

    def __init__(self, group: Group) -> None:
        self.group = group
        # Those of plans that are in use, and what makes those of `allreduce_gradients`.
        self.plans: WeakValueDictionary[tuple[Spec, ...], Fusion] = WeakValueDictionary()
        self.gradients = recent_fusions()
        # Reductions of trees on devices that are recorded; see `_trees/device_leaves.py`.
        self.recorded: dict[Hashable, Any] = {}


def recent_fusions() -> Callable[[tuple[Spec, ...], int], Fusion]:
    """Return what makes fusions, and keeps those that were used last, with their memory.

    Those of two kinds are kept, for models that are trained in turns, and that of no leaf, which
    steps reduce if their gradients were reduced before.
    """
    return lru_cache(maxsize=3)(Fusion)


def _are_apart(views: Iterable[BufferView | None]) -> bool:
    """Return whether no two arrays share a byte, as far as the ends of their memory say."""
    arrays = [view.array for view in views if view is not None and view.array.size]
    ends = sorted(np.lib.array_utils.byte_bounds(array) for array in arrays)
    return all(one[1] <= other[0] for one, other in pairwise(ends))


def _whole(leaf: int, slot: LeafSlot) -> Part:
    """Return all of a leaf, as a part of the buffer."""
    itemsize = slot.dtype.itemsize
    start, stop = slot.elements.start * itemsize, slot.elements.stop * itemsize
    return Part(leaf, 0, stop - start, start)
