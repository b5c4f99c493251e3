"""Memory cut into what movements take: a block for each rank, and pieces of at most `MAX_BYTES`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._transports.base import MAX_BYTES, Blocks, Bytes, Flat, Link


def bounds_of(lengths: Iterable[int], elements: int = 1) -> list[int]:
    """Return where parts of this many rows of `elements` begin, and where the last one ends."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length * elements)
    return bounds


def rows_of(array: Flat, count: int) -> list[Flat]:
    """Return memory as `count` rows of one length."""
    length = len(array) // count
    return [array[row * length : (row + 1) * length] for row in range(count)]


def blocks_of(array: Flat, bounds: Sequence[int]) -> Blocks:
    """Return elements bounds[r] to bounds[r + 1] of the array, as blocks of bytes."""
    itemsize, first = array.itemsize, bounds[0]
    offsets = [(bound - first) * itemsize for bound in bounds]
    counts = [end - start for start, end in pairwise(offsets)]
    return Blocks(raw(array[first : bounds[-1]]), counts, offsets[:-1])


def only(array: Flat, rank: int, size: int) -> Blocks:
    """Return the whole array for one rank, nothing for the others."""
    counts = [array.nbytes if other == rank else 0 for other in range(size)]
    return Blocks(raw(array), counts, [0] * size)


def nothing(link: Link) -> Blocks:
    """Return blocks of which all are empty."""
    return Blocks(link.empty(0, np.dtype(np.uint8)), [0] * link.size, [0] * link.size)


def in_order(array: Flat, counts: Sequence[int]) -> Blocks:
    """Return this many elements of the array for each rank, one after another, as blocks."""
    return blocks_of(array, bounds_of(counts))


def raw(array: Flat) -> Flat:
    """Return elements as bytes."""
    return array.view(np.uint8)


def columns_of(link: Link, array: Flat, bounds: Sequence[int], columns: range) -> Blocks:
    """Return the elements at `columns` of each rank's part of an array, as far as it has them."""
    parts = [range(begin, end)[columns.start : columns.stop] for begin, end in pairwise(bounds)]
    counts = [len(part) for part in parts]
    if array.nbytes > MAX_BYTES:
        packed = in_order(link.empty(sum(counts), array.dtype), counts)
        for rank, part in enumerate(parts):
            packed.block(rank)[...] = raw(array[part.start : part.stop])
        return packed
    size = array.itemsize
    return Blocks(raw(array), [n * size for n in counts], [part.start * size for part in parts])


def pieces_of(bounds: Sequence[int], itemsize: int) -> Iterator[tuple[int, range]]:
    """Yield each part, and the elements of a piece of it that one movement can take."""
    step = MAX_BYTES // itemsize
    for rank, (begin, end) in enumerate(pairwise(bounds)):
        for start in range(begin, end, step):
            yield rank, range(start, min(start + step, end))


def cut(data: Bytes) -> list[Bytes]:
    """Return bytes in pieces of which each is one movement."""
    return [data[start : start + MAX_BYTES] for start in range(0, len(data), MAX_BYTES)]


def fit(nbytes: int) -> bool:
    """Return whether one movement can take this many bytes."""
    return nbytes <= MAX_BYTES


def overlap(one: Flat, other: Flat) -> bool:
    """Return whether two pieces of contiguous memory have a byte in common."""
    if isinstance(one, DeviceBuffer) and isinstance(other, DeviceBuffer):
        return one.shares(other)
    return not isinstance(one, DeviceBuffer) and bool(np.may_share_memory(one, other))
