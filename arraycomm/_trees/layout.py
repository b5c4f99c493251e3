"""Where each leaf of a tree travels: buckets, slots and chunks, from dtypes and shapes alone.

Nothing here depends on a rank, a device or a memory address, so every rank finds the same layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from arraycomm._dtypes import DType

# Leaves of this many bytes share no bucket with smaller ones: they need not be copied to be sent.
LARGE: Final = 1 << 20
# Every leaf begins at a multiple of this; JAX takes over only memory with this alignment.
ALIGNMENT: Final = 64

Spec: TypeAlias = tuple[DType, tuple[int, ...]]
# A dtype, and whether the leaves are large.
_Kind: TypeAlias = tuple[DType, bool]


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


class LeafSlot(NamedTuple):
    """One leaf among buckets that lie one after another; `elements` count in its own dtype."""

    dtype: DType
    elements: slice
    shape: tuple[int, ...]


# The leaf that stands for the memory of the results.
RESULTS: Final = -1


class Part(NamedTuple):
    """The bytes `first` to `last` of a leaf, which begin at byte `at` of their chunk."""

    leaf: int
    first: int
    last: int
    at: int


class Chunk(NamedTuple):
    """The bytes `start` to `stop` of buckets that lie one after another; reduced at once."""

    dtype: DType
    start: int
    stop: int
    parts: tuple[Part, ...]


@lru_cache(maxsize=256)
def lay_out(specs: tuple[Spec, ...], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Distribute leaves over buckets by dtype, in order; a bucket ends once it is full.

    Every bucket holds at least `bucket_bytes`, but for the last one with large leaves of a dtype
    and the last one with others. A leaf is never cut. Devices play no part: they may differ between
    ranks, and the layout must not.
    """
    waiting: dict[_Kind, list[Piece]] = {}
    ends: dict[_Kind, int] = {}
    buckets: list[Bucket] = []
    for leaf, (dtype, shape) in enumerate(specs):
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        kind = (dtype, nbytes >= LARGE)
        offset = ends.get(kind, 0)
        waiting.setdefault(kind, []).append(Piece(leaf, offset, nbytes))
        ends[kind] = offset + nbytes + -nbytes % ALIGNMENT
        if ends[kind] >= bucket_bytes:
            buckets.append(Bucket(dtype, ends.pop(kind), tuple(waiting.pop(kind))))
    buckets.extend(Bucket(kind[0], ends[kind], tuple(waiting[kind])) for kind in waiting)
    return tuple(buckets)


def slots_of(specs: tuple[Spec, ...], buckets: Iterable[Bucket]) -> tuple[LeafSlot, ...]:
    """Return a slot for each leaf, in their order."""
    slots, base = dict[int, LeafSlot](), 0
    for bucket in buckets:
        for leaf, offset, nbytes in bucket.pieces:
            dtype, shape = specs[leaf]
            start, count = (base + offset) // dtype.itemsize, nbytes // dtype.itemsize
            slots[leaf] = LeafSlot(dtype, slice(start, start + count), shape)
        base += bucket.nbytes
    return tuple(slots[leaf] for leaf in range(len(specs)))


class Transfer(NamedTuple):
    """The bytes `start` to `stop` of consecutive buckets: all those of one leaf, or of several."""

    dtype: DType
    start: int
    stop: int
    leaf: int | None


def transfers(buckets: Iterable[Bucket], least: int) -> Iterator[Transfer]:
    """Cut consecutive buckets into messages: leaves of `least` bytes or more have their own."""
    base = 0
    for bucket in buckets:
        start = base
        for leaf, offset, nbytes in bucket.pieces:
            if nbytes < least:
                continue
            if start < base + offset:
                yield Transfer(bucket.dtype, start, base + offset, None)
            start = base + offset + nbytes
            yield Transfer(bucket.dtype, base + offset, start, leaf)
            start += -nbytes % ALIGNMENT
        base += bucket.nbytes
        if start < base:
            yield Transfer(bucket.dtype, start, base, None)


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
