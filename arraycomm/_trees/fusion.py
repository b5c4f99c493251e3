"""Fusion: the leaves of a tree reduced as few large messages, or through shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._folds import fold
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.group import Group
from arraycomm._reduce import algorithms, chain
from arraycomm._reduce.segment import ROWS, SharedSegment, segment_of
from arraycomm._transports.base import Bytes, Steps, Transport
from arraycomm._trees.buffers import BYTE, BufferPool, Packed, Sources, copy_into
from arraycomm._trees.held import ChunkTables, Held, hold, table_of
from arraycomm._trees.layout import LeafSlot, Message, Part, Spec, cut, lay_out, messages, slots_of
from arraycomm._trees.shared_memory import ChunkLayout

# To write results over smaller leaves takes longer than to write them elsewhere.
_LARGE: Final = 64 << 10
# Between nodes, a leaf with so many bytes for each rank is a message of its own.
_ALONE: Final = 512 << 10
_NONE: Final[frozenset[int]] = frozenset()
# The kinds of gradients whose memory is kept.
_RECENT: Final = 2
# The number of a leaf's dtype, which of its elements in the buffer are the leaf's, and their shape
# if not flat.
_Place: TypeAlias = tuple[int, slice, tuple[int, ...] | None]


class Fusion:
    """Leaves of these dtypes and shapes as few messages; calls reuse its memory.

    Parameters
    ----------
    specs : tuple of (dtype, shape)
        The leaves, the same on every rank.
    bucket_bytes : int
        About how many bytes a message has, if leaves travel as messages.
    """

    def __init__(self, specs: tuple[Spec, ...], bucket_bytes: int) -> None:
        self.specs = specs
        self.bucket_bytes = bucket_bytes
        self.buckets = lay_out(specs, bucket_bytes)
        self.nbytes = sum(bucket.nbytes for bucket in self.buckets)
        self._slots = slots_of(specs, self.buckets)
        self._pool = BufferPool(self.nbytes)
        # Made when the leaves first go through the shared segment.
        self._layouts: tuple[ChunkLayout, ...] | None = None
        self._are_cut: set[int] = set()
        self._tables: ChunkTables | None = None
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in specs]
        self._large = [leaf for leaf, nbytes in enumerate(sizes) if nbytes >= _LARGE]
        # Holds a list of leaves, if all are contiguous arrays of NumPy that need no conversion.
        self.hold = hold(specs)
        self._parts = [Part(slot.leaf, 0, sizes[slot.leaf], slot.offset) for slot in self._slots]
        self._whole = table_of(self._parts)
        # Made when leaves first go between nodes, with what is copied for them.
        self._messages: tuple[Message, ...] | None = None
        self._together = self._whole
        self._dtypes = list(dict.fromkeys(dtype for dtype, _ in specs))
        self._places = [self._place(slot, sizes[slot.leaf]) for slot in sorted(self._slots)]

    def is_of(self, specs: tuple[Spec, ...], bucket_bytes: int) -> bool:
        """Return whether it has these leaves, in messages of about so many bytes."""
        return self.bucket_bytes == bucket_bytes and self.specs == specs

    def _place(self, slot: LeafSlot, nbytes: int) -> _Place:
        start, itemsize = slot.offset, slot.dtype.itemsize
        elements = slice(start // itemsize, (start + nbytes) // itemsize)
        flat = len(slot.shape) == 1
        return self._dtypes.index(slot.dtype), elements, None if flat else slot.shape

    def arrays(self, packed: Packed) -> list[Array]:
        """Return each leaf's slot; for a thousand, slices are quicker than `Packed.leaves`."""
        flats = [packed.buffer.view(dtype) for dtype in self._dtypes]
        return [
            flats[number][elements] if shape is None else flats[number][elements].reshape(shape)
            for number, elements, shape in self._places
        ]

    def acquire(self) -> Packed:
        """Return memory for the results of one call."""
        buffer, new = self._pool.acquire()
        packed = Packed(self.buckets, self._slots, buffer)
        if new:
            packed.clear_gaps()
        return packed

    def prepare(self, memory: TreeMemory) -> Steps:
        """Return the shared segment through which the leaves travel, or None; collective."""
        group = memory.group
        if group.size == 1 or self.nbytes <= group.inline_bytes:
            return None
        transport = group.transport
        if transport.chain is None:
            return (yield from segment_of(transport))
        if not chain.is_preferred(transport, self._dtypes, self.nbytes):
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
            # The fold of one rank's leaves is these leaves.
            self.pack(packed, sources)
            return _NONE
        segment = yield from self.prepare(memory)
        if segment is not None:
            over = _NONE
            if may_overwrite and not isinstance(sources, Held):
                over = self._overwritable(sources)
            held = self._held(sources)
            if held is None:
                assert not isinstance(sources, Held)
                yield from self._reduce_chunks(segment, packed, sources, op, over)
                return over
            layouts = self._layouts_in(segment)
            if not segment.chained:
                if self._tables is None or self._tables.over != over:
                    self._tables = ChunkTables((each.tables(over) for each in layouts), over)
                yield from held.reduce(segment, self._tables, op, packed.buffer)
                return over
            flats = {leaf: _flat(held.arrays[leaf]) for leaf in over}
            tasks = (each.held_task(held, flats, packed.buffer, over) for each in layouts)
            yield from segment.reduce(tasks, op, self.nbytes)
            return over
        yield from self._reduce_messages(memory.group.transport, packed, sources, op)
        return _NONE

    def _reduce_messages(
        self, link: Transport, packed: Packed, sources: Sources | Held, op: str
    ) -> Steps:
        """Reduce large leaves from where they lie, and the others in `packed`."""
        if self._messages is None:
            self._messages = tuple(messages(self.buckets, _ALONE * link.size))
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
            sources.fill(packed.buffer, self._whole)
        else:
            packed.pack(sources)

    def _held(self, sources: Sources | Held) -> Held | None:
        if isinstance(sources, Held):
            return sources
        return self.hold([None if source is None else source.array for source in sources])

    def fold_payloads(self, group: Group, packed: Packed, agreement: Agreement, op: str) -> None:
        """Fold the payloads of the ranks' headers into `packed`."""
        rows = [packed.split(agreement.payload(r, self.nbytes)) for r in range(group.size)]
        for number, bucket in enumerate(self.buckets):
            parts = [row[number].view(bucket.dtype) for row in rows]
            fold(op, bucket.dtype, parts, packed.memory[number].view(bucket.dtype))

    def _overwritable(self, sources: Sources) -> frozenset[int]:
        """Return the large leaves over which results can be written: no other has their memory."""
        views = {leaf: view for leaf in self._large if (view := sources[leaf]) is not None}
        found = [
            leaf
            for leaf, view in views.items()
            if view.array.flags.carray
            and view.array.dtype == self.specs[leaf][0]
            and not (view.copied or view.readonly)
        ]
        return frozenset(found) if found and _are_apart(sources) else _NONE

    def _reduce_chunks(
        self,
        segment: SharedSegment,
        packed: Packed,
        sources: Sources,
        op: str,
        over: frozenset[int],
    ) -> Steps:
        layouts = self._layouts_in(segment)
        arrays = self._arrays(packed, sources)
        flats = {leaf: _flat(arrays[leaf]) for leaf in self._are_cut | over}
        tasks = (layout.chunk_task(arrays, flats, packed.buffer, over) for layout in layouts)
        yield from segment.reduce(tasks, op, self.nbytes)

    def _layouts_in(self, segment: SharedSegment) -> tuple[ChunkLayout, ...]:
        if self._layouts is None:
            chunks = enumerate(cut(self.buckets, segment.chunk_for(self.nbytes)))
            self._layouts = tuple(
                ChunkLayout(chunk, segment, number % ROWS, self.specs) for number, chunk in chunks
            )
            self._are_cut = {leaf for layout in self._layouts for leaf, *_ in layout.ends}
        # They begin with the first rows, which are free after the header.
        segment.position = len(self._layouts)
        return self._layouts

    def _arrays(self, packed: Packed, sources: Sources) -> list[Array | None]:
        """Return each leaf itself, or its slot with a copy if it needs another dtype or layout."""
        arrays: list[Array | None] = []
        slots: dict[int, Array] | None = None
        for leaf, source in enumerate(sources):
            array = None if source is None else source.array
            if array is not None and (
                array.dtype != self.specs[leaf][0]
                or (leaf in self._are_cut and not array.flags.c_contiguous)
            ):
                slots = slots or dict(packed.leaves())
                copy_into(slots[leaf], array)
                array = slots[leaf]
            arrays.append(array)
        return arrays


class TreeMemory:
    """The memory through which one communicator reduces trees.

    Attributes
    ----------
    group : Group
        The communicator's.
    plans : mapping
        The fusions of plans that are in use, by their dtypes and shapes.
    gradients : RecentFusions
        The fusions of `allreduce_gradients`.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.plans: WeakValueDictionary[tuple[Spec, ...], Fusion] = WeakValueDictionary()
        self.gradients = RecentFusions()


class RecentFusions:
    """The fusions of the gradients that were reduced last, with their memory.

    Those of two kinds are kept, for models that are trained in turns; one without bytes is made in
    no time.
    """

    def __init__(self) -> None:
        self._kept: list[Fusion] = []

    def of(self, specs: tuple[Spec, ...], bucket_bytes: int) -> Fusion:
        """Return the fusion of gradients of these specs."""
        found = next((kept for kept in self._kept if kept.is_of(specs, bucket_bytes)), None)
        found = found or Fusion(specs, bucket_bytes)
        if found.nbytes:
            self._kept = [found, *(kept for kept in self._kept if kept is not found)][:_RECENT]
        return found


def _are_apart(views: Iterable[BufferView | None]) -> bool:
    """Return whether no two arrays share a byte, as far as the ends of their memory say."""
    arrays = [view.array for view in views if view is not None and view.array.size]
    ends = sorted(np.lib.array_utils.byte_bounds(array) for array in arrays)
    return all(one[1] <= other[0] for one, other in pairwise(ends))


def _flat(array: Array | None) -> Bytes | None:
    return None if array is None else array.reshape(-1).view(BYTE)
