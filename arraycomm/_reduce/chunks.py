"""The chunks of large reductions: length, scratch memory, and how they follow one another."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from math import isqrt
from typing import Final, NamedTuple

import numpy as np

from arraycomm._dtypes import DType
from arraycomm._reduce import selection
from arraycomm._reduce.blocks import bounds_of, rows_of
from arraycomm._transports.base import Flat, Handle, Link, Steps, Transport

# Reductions of few ranks whose movements overlap go in about this many chunks, each of at least
# this many bytes.
_OVERLAPPING: Final = 4
_LEAST_CHUNK: Final = 1 << 20
# No chunk is larger. All have whole cache lines, which have whole elements.
_LARGEST_CHUNK: Final = 256 << 20
_LINE: Final = 64
# Twice the bytes that are folded while an empty message is under way; see the model of
# docs/evidence/scaling.md.
_FOLDED: Final = 32 << 10


def ranges(link: Link, array: Flat, rows: int = 1) -> list[range]:
    """Cut an array, of which `rows` are moved at once, into chunks that are small enough."""
    return cut(len(array), step(link, array, rows))


def step(link: Link, array: Flat, rows: int = 1) -> int:
    """Return the elements of such a chunk."""
    nbytes, itemsize = link.chunk_bytes or selection.CHUNK_BYTES, int(array.itemsize)
    return max(nbytes // (itemsize * rows), link.size // rows)


def cut(count: int, step: int) -> list[range]:
    """Cut this many elements into chunks."""
    return [range(start, min(start + step, count)) for start in range(0, count, step)]


def slices(count: int, size: int) -> list[int]:
    """Return where each rank's slice of this many elements starts, and where the last one ends."""
    return [count * rank // size for rank in range(size + 1)]


class Cut(NamedTuple):
    """A chunk that goes in slices: which elements it has, and which of them this rank folds.

    Of the bytes: the slices of all ranks and where they begin, what is sent of them, and what
    comes, and where to.
    """

    chunk: slice
    own: slice
    longest: int
    counts: list[int]
    offsets: list[int]
    sent: list[int]
    come: list[int]
    places: list[int]


def cuts_of(link: Link, source: Flat, nbytes: int | None = None) -> list[Cut]:
    """Return the chunks of an array cut in slices; `nbytes` are those of all arrays, if several."""
    if link.overlaps:
        chunk = overlapping_chunk(source.nbytes if nbytes is None else nbytes, link.size)
        longest = max(chunk // int(source.itemsize), link.size)
    else:
        longest = step(link, source)
    return _cuts(len(source), longest, link.size, link.rank, source.itemsize)


@lru_cache(maxsize=256)
def _cuts(count: int, step: int, size: int, rank: int, itemsize: int) -> list[Cut]:
    """Cut `count` elements into chunks of up to `step`, these into slices; nobody changes them."""
    found = []
    for chunk in cut(count, step):
        bounds = [bound * itemsize for bound in slices(len(chunk), size)]
        counts = [end - start for start, end in pairwise(bounds)]
        own = slice(*(chunk.start + bound // itemsize for bound in bounds[rank : rank + 2]))
        others = [peer != rank for peer in range(size)]
        sent = [n * other for n, other in zip(counts, others, strict=True)]
        come = [counts[rank] * other for other in others]
        places = bounds_of(come)[:-1]
        whole, longest = slice(chunk.start, chunk.stop), own.stop - own.start
        found.append(Cut(whole, own, longest, counts, bounds[:-1], sent, come, places))
    return found


def reserve(transport: Transport, nbytes: int) -> None:
    """Take the memory that reductions of up to this many bytes of host memory use.

    This is before the header, when a rank may still have too little of it.
    """
    if transport.size > 1:
        transport.take(scratch_bytes(transport, nbytes), np.dtype(np.uint8))


def overlapping_chunk(nbytes: int, size: int) -> int:
    """Return the bytes of a chunk if movements overlap; all chunks are about as long.

    Each chunk costs the latencies of two messages to every rank, and all folds but that of one
    chunk hide behind messages. The sum is least at the square root of size · nbytes · `_FOLDED`.
    """
    count = max(-(-nbytes // _best_chunk(nbytes, size)), 1)
    return max(-(-nbytes // (_LINE * count)), 1) * _LINE


def _best_chunk(nbytes: int, size: int) -> int:
    few = min(max(nbytes // _OVERLAPPING, _LEAST_CHUNK), selection.CHUNK_BYTES)
    return min(max(few, isqrt(_FOLDED * size * nbytes)), _LARGEST_CHUNK)


def scratch_bytes(link: Link, nbytes: int) -> int:
    """Return the bytes of scratch memory that suffice for reductions of up to this many bytes."""
    room = 2 * selection.CHUNK_BYTES
    if link.overlaps:
        # Two chunks are on their way, in a scan with what is folded of them.
        chunk = min(_best_chunk(nbytes, link.size), nbytes) + _LINE
        room = max(2 * room, 2 * chunk)
    return room + _LINE * link.size


def one_by_one(
    link: Link,
    count: int,
    begin: Callable[[int], Handle],
    fold: Callable[[int], None],
    after: Callable[[int], Handle] | None = None,
) -> Steps:
    """For each chunk, `begin` its move to where it is folded, `fold` it, move the result `after`.

    If movements overlap, the next chunk is on its way while one is folded, and so is the result
    before.
    """
    begun, last = list[Handle](), None
    for number in range(count):
        ahead = min(number + 1 + link.overlaps, count)
        begun += [begin(further) for further in range(number + len(begun), ahead)]
        yield begun.pop(0)
        fold(number)
        if last is not None:
            yield last
        last = after and after(number)
        if last is not None and not (link.overlaps and number + 1 < count):
            yield last
            last = None


def halves(link: Link, chunks: int, length: int, dtype: DType) -> list[Flat]:
    """Return scratch memory for `chunks` chunks, for the even and the odd ones if two are sent."""
    count = 1 + (link.overlaps and chunks > 1)
    return rows_of(link.take(count * length, dtype), count) * (3 - count)
