"""Fusion: many leaves as few large messages, through memory that is used again.

`lay_out` and `cut` are pure: from dtypes and shapes alone they say where each leaf travels, so that
every rank comes to the same answer.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.results import allocate
from arraycomm._collectives import algorithms
from arraycomm._dtypes import DType
from arraycomm._folds import fold
from arraycomm._protocol.header import Agreement, Steps
from arraycomm._transports.base import Bytes
from arraycomm._trees.shared_memory import ROWS, ChunkTask, SharedSegment, segment_of

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator

# Every leaf begins at a multiple of this, as JAX wants it of memory that it takes over.
_ALIGNMENT: Final = 64
_BYTE: Final = np.dtype(np.uint8)
# Blocks of memory kept for the results of one fusion: those of one step may still be in use while
# the next is under way.
_MAX_KEPT: Final = 2

Array = np.ndarray[Any, Any]
Spec = tuple[DType, tuple[int, ...]]
Sources = Sequence[BufferView | None]


class Piece(NamedTuple):
    """Where one leaf lies in its bucket, in bytes."""

    leaf: int
    offset: int
    nbytes: int


class Bucket(NamedTuple):
    """One message: leaves of one dtype, each aligned for the frameworks that alias it."""

    dtype: DType
    nbytes: int
    pieces: tuple[Piece, ...]


class Part(NamedTuple):
    """The bytes `first` to `last` of a leaf, which lie from byte `at` of their chunk."""

    leaf: int
    first: int
    last: int
    at: int


class Chunk(NamedTuple):
    """The bytes `start` to `stop` of all buckets in a row: what is reduced at once."""

    dtype: DType
    start: int
    stop: int
    parts: tuple[Part, ...]


@lru_cache(maxsize=256)
def lay_out(specs: tuple[Spec, ...], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Distribute leaves over buckets by dtype, in order; a bucket ends once it is full.

    Every bucket but the last of a dtype holds at least `bucket_bytes`; a leaf is never cut. Devices
    play no part, since they may differ between ranks and the layout must not.
    """
    waiting: dict[DType, list[Piece]] = {}
    ends: dict[DType, int] = {}
    buckets: list[Bucket] = []
    for leaf, (dtype, shape) in enumerate(specs):
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        offset = ends.get(dtype, 0)
        waiting.setdefault(dtype, []).append(Piece(leaf, offset, nbytes))
        ends[dtype] = offset + nbytes + -nbytes % _ALIGNMENT
        if ends[dtype] >= bucket_bytes:
            buckets.append(Bucket(dtype, ends.pop(dtype), tuple(waiting.pop(dtype))))
    buckets.extend(Bucket(dtype, ends[dtype], tuple(waiting[dtype])) for dtype in waiting)
    return tuple(buckets)


def cut(buckets: Iterable[Bucket], chunk_bytes: int) -> Iterator[Chunk]:
    """Cut buckets that lie one after another into chunks of at most `chunk_bytes` and one dtype.

    Each byte of each leaf lies in one chunk; a leaf may be cut. `chunk_bytes` is a multiple of 64.
    """
    base = 0
    for bucket in buckets:
        pieces = [piece for piece in bucket.pieces if piece.nbytes]
        first = 0
        for start in range(0, bucket.nbytes, chunk_bytes):
            stop = min(start + chunk_bytes, bucket.nbytes)
            parts = []
            while first < len(pieces) and pieces[first].offset < stop:
                leaf, offset, nbytes = pieces[first]
                begin, end = max(offset, start), min(offset + nbytes, stop)
                parts.append(Part(leaf, begin - offset, end - offset, begin - start))
                if offset + nbytes > stop:
                    break
                first += 1
            yield Chunk(bucket.dtype, base + start, base + stop, tuple(parts))
        base += bucket.nbytes


class Blocks:
    """Blocks of memory of one size, lent for results and taken back once these are gone.

    Whatever aliases a block, in any framework, keeps its loan alive; so a block is never written
    while anyone can still read it.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._kept: list[tuple[Bytes, weakref.ref[Any]]] = []

    def acquire(self) -> tuple[Bytes, bool]:
        """Return memory that nobody else uses, and whether it is new."""
        for place, (memory, last) in enumerate(self._kept):
            if last() is None:
                block, loan = _lent(memory)
                self._kept[place] = (memory, loan)
                return block, False
        memory = allocate((self._nbytes,), _BYTE)
        block, loan = _lent(memory)
        if len(self._kept) < _MAX_KEPT:
            self._kept.append((memory, loan))
        return block, True


def _lent(memory: Bytes) -> tuple[Bytes, weakref.ref[Any]]:
    if not len(memory):
        return memory, weakref.ref(memory)
    # NumPy's own views would name `memory` itself as their base, which the lender keeps alive.
    kind: Any = ctypes.c_char * len(memory)
    loan = kind.from_buffer(memory)
    return np.ndarray(memory.shape, _BYTE, loan), weakref.ref(loan)


class Place(NamedTuple):
    """Where a leaf lies among buckets that lie one after another, in bytes."""

    leaf: int
    shape: tuple[int, ...]
    dtype: DType
    offset: int


def places_of(specs: tuple[Spec, ...], buckets: Iterable[Bucket]) -> tuple[Place, ...]:
    """Return the leaves' places, bucket by bucket."""
    places, base = [], 0
    for bucket in buckets:
        for leaf, offset, _ in bucket.pieces:
            dtype, shape = specs[leaf]
            places.append(Place(leaf, shape, dtype, base + offset))
        base += bucket.nbytes
    return tuple(places)


class Packed:
    """Leaves in buckets, which lie one after another in one block of memory."""

    def __init__(
        self, buckets: tuple[Bucket, ...], places: tuple[Place, ...], block: Bytes | None = None
    ) -> None:
        self.buckets = buckets
        self._places = places
        self.nbytes = sum(bucket.nbytes for bucket in buckets)
        self.block = allocate((self.nbytes,), _BYTE) if block is None else block
        self.memory = self.take_apart(self.block)

    def leaves(self) -> Iterator[tuple[int, Array]]:
        """Yield each leaf's number and its place, as an array of its dtype and shape."""
        for leaf, shape, dtype, offset in self._places:
            yield leaf, np.ndarray(shape, dtype, self.block, offset)

    def pack(self, sources: Sources) -> None:
        """Copy the leaves in; None stands for zeros."""
        for leaf, place in self.leaves():
            source = sources[leaf]
            if source is None:
                place[...] = 0
            else:
                _copy(source.array, place)

    def clear_gaps(self) -> None:
        """Zero the bytes between leaves: what is sent there is reduced as well, if for nothing."""
        for bucket, memory in zip(self.buckets, self.memory, strict=True):
            for _, offset, nbytes in bucket.pieces:
                memory[offset + nbytes : offset + nbytes + -nbytes % _ALIGNMENT] = 0

    def take_apart(self, block: Bytes) -> list[Bytes]:
        """Return the parts of such a block that are buckets, without a copy."""
        parts, start = [], 0
        for bucket in self.buckets:
            parts.append(block[start : start + bucket.nbytes])
            start += bucket.nbytes
        return parts


def _copy(array: Array, place: Array) -> None:
    if array.dtype == place.dtype:
        place[...] = array
    else:
        # Compressed: what is too large for the narrower dtype becomes infinite.
        with np.errstate(all="ignore"):
            place[...] = array


class Fusion:
    """Leaves of these dtypes and shapes as few messages; kept, it allocates nothing from call to call.

    Parameters
    ----------
    specs : tuple of (dtype, shape)
        The leaves, the same on every rank.
    bucket_bytes : int
        Where leaves travel as messages, of about how many bytes.
    """

    def __init__(self, specs: tuple[Spec, ...], bucket_bytes: int) -> None:
        self.specs = specs
        self.bucket_bytes = bucket_bytes
        self.buckets = lay_out(specs, bucket_bytes)
        self.nbytes = sum(bucket.nbytes for bucket in self.buckets)
        self._places = places_of(specs, self.buckets)
        self._blocks = Blocks(self.nbytes)
        # Worked out when the leaves first go through the window.
        self._layouts: tuple[ChunkLayout, ...] | None = None
        self._are_cut: set[int] = set()

    def take(self) -> Packed:
        """Return memory for the results of one call."""
        block, new = self._blocks.acquire()
        packed = Packed(self.buckets, self._places, block)
        if new:
            packed.clear_gaps()
        return packed

    def prepare(self, comm: Communicator) -> Steps:
        """Return the window through which the leaves travel, None where they do not; collective."""
        if comm.size == 1 or self.nbytes <= algorithms.MAX_STEPS * comm._inline:
            return None
        return (yield from segment_of(comm))

    def reduce(self, comm: Communicator, packed: Packed, sources: Sources, op: str) -> Steps:
        """Reduce the ranks' leaves into `packed`.

        Through shared memory every byte is copied in once, and folded straight to its place.
        """
        if comm.size == 1:
            # The fold of one rank's leaves is these leaves.
            packed.pack(sources)
            return
        segment = yield from self.prepare(comm)
        if segment is not None:
            yield from self._reduce_chunks(segment, packed, sources, op)
            return
        packed.pack(sources)
        for bucket, memory in zip(self.buckets, packed.memory, strict=True):
            flat = memory.view(bucket.dtype)
            yield from algorithms.allreduce(comm._link, flat, flat, op)

    def fold_payloads(
        self, comm: Communicator, packed: Packed, agreement: Agreement, op: str
    ) -> None:
        """Fold what came with the headers into `packed`."""
        rows = [packed.take_apart(agreement.payload(r, self.nbytes)) for r in range(comm.size)]
        for number, bucket in enumerate(self.buckets):
            parts = [row[number].view(bucket.dtype) for row in rows]
            fold(op, bucket.dtype, parts, packed.memory[number].view(bucket.dtype))

    def _reduce_chunks(
        self, segment: SharedSegment, packed: Packed, sources: Sources, op: str
    ) -> Steps:
        if self._layouts is None:
            chunks = enumerate(cut(self.buckets, segment.chunk_bytes))
            self._layouts = tuple(
                ChunkLayout(chunk, segment, number % ROWS, self.specs) for number, chunk in chunks
            )
            self._are_cut = {leaf for placement in self._layouts for leaf, *_ in placement.ends}
        arrays = self._arrays(packed, sources)
        flats = {leaf: _flat(arrays[leaf]) for leaf in self._are_cut}
        yield from segment.reduce(
            (placement.chunk_task(arrays, flats, packed.block) for placement in self._layouts), op
        )

    def _arrays(self, packed: Packed, sources: Sources) -> list[Array | None]:
        """Return each leaf as it is, or copied to its place where it needs another dtype or layout."""
        arrays: list[Array | None] = []
        places: dict[int, Array] | None = None
        for leaf, source in enumerate(sources):
            array = None if source is None else source.array
            if array is not None and (
                array.dtype != self.specs[leaf][0]
                or (leaf in self._are_cut and not array.flags.c_contiguous)
            ):
                places = places or dict(packed.leaves())
                _copy(array, places[leaf])
                array = places[leaf]
            arrays.append(array)
        return arrays


class ChunkLayout:
    """A chunk's way through a window, whose places there are worked out once.

    Attributes
    ----------
    place : slice
        Where the chunk lies among all buckets.
    rows : list of ndarray
        Every rank's row as elements of the chunk.
    leaves : list of (int, ndarray)
        The leaves that lie in the chunk as a whole, and their places in this rank's row.
    ends : list of (int, slice, ndarray)
        The same for leaves that are cut: which of their bytes lie where.
    """

    def __init__(
        self, chunk: Chunk, segment: SharedSegment, number: int, specs: tuple[Spec, ...]
    ) -> None:
        self.dtype, self.place = chunk.dtype, slice(chunk.start, chunk.stop)
        rows = segment.rows[number, :, : chunk.stop - chunk.start]
        self.rows = list(rows.view(chunk.dtype))
        self.leaves: list[tuple[int, Array]] = []
        self.ends: list[tuple[int, slice, Bytes]] = []
        mine = rows[segment.control.rank]
        for leaf, first, last, at in chunk.parts:
            dtype, shape = specs[leaf]
            part = mine[at : at + last - first]
            if last - first == math.prod(shape) * dtype.itemsize:
                self.leaves.append((leaf, part.view(dtype).reshape(shape)))
            else:
                self.ends.append((leaf, slice(first, last), part))

    def chunk_task(
        self,
        arrays: Sequence[Array | None],
        flats: Mapping[int, Bytes | None],
        block: Bytes,
    ) -> ChunkTask:
        """Return this way for the leaves of one call."""
        return ChunkTask(
            lambda: self.fill(arrays, flats),
            self.dtype,
            self.rows,
            lambda: block[self.place].view(self.dtype),
        )

    def fill(self, arrays: Sequence[Array | None], flats: Mapping[int, Bytes | None]) -> None:
        """Copy the leaves' parts into this rank's row; None stands for zeros."""
        for leaf, place in self.leaves:
            array = arrays[leaf]
            place[...] = 0 if array is None else array
        for leaf, part, into in self.ends:
            flat = flats[leaf]
            into[...] = 0 if flat is None else flat[part]


def _flat(array: Array | None) -> Bytes | None:
    return None if array is None else array.reshape(-1).view(_BYTE)
