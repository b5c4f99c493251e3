"""How each collective moves its data, written once over the transport's movements.

Every function is a generator: it yields what it waits for, so that one thread can drive several
calls, blocking or not. Sources and targets are one-dimensional, contiguous arrays of one dtype.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise

import numpy as np

from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._collectives import chunks, segment, selection
from arraycomm._collectives.blocks import (
    blocks_of,
    bounds_of,
    columns_of,
    cut,
    fit,
    in_order,
    nothing,
    only,
    pieces_of,
    raw,
    rows_of,
)
from arraycomm._collectives.selection import Algorithm, select
from arraycomm._transports.base import Blocks, Flat, Handle, Link, Transport
from arraycomm._transports.control import PAYLOAD

Moves = Generator[Handle, None, None]


def allreduce(link: Link, source: Flat, target: Flat, op: str) -> Moves:
    """Fold all ranks' `source` into every rank's `target`; the two may be the same memory."""
    algorithm = select(link, op, source.dtype, source.nbytes)
    if algorithm is Algorithm.NATIVE:
        yield link.allreduce(source, target, op)
        return
    if algorithm is Algorithm.SEGMENT:
        if found := (yield from segment.streaming_segment_of(link)):
            yield from found.reduce(segment.chunk_tasks(found, source, target), op)
            return
        algorithm = selection.without_segment(link, source.nbytes)
    yield from _reduce_by(algorithm, link, source, target, op)


def reduce(link: Link, source: Flat, target: Flat | None, op: str, root: int) -> Moves:
    """Fold all ranks' `source` into the `target` of `root`; the others pass None."""
    algorithm = selection.choose(source.nbytes, link.size, *link.slot)
    yield from _reduce_by(algorithm, link, source, target, op, root)


def _reduce_by(
    algorithm: Algorithm,
    link: Link,
    source: Flat,
    target: Flat | None,
    op: str,
    root: int | None = None,
) -> Moves:
    """Fold into the `target` of `root`, which alone has one, or of every rank if that is None."""
    match algorithm:
        case Algorithm.LOCAL:
            link.fold(op, source.dtype, [_unaliased(source, target)], target)
        case Algorithm.HEADER | Algorithm.STEPS:
            yield from _in_steps(link, source, target, op)
        case Algorithm.GATHER:
            into = None if target is None else link.take(link.size * len(source), source.dtype)
            bounds = bounds_of([len(source)] * link.size)
            yield from gatherv(link, source, into, bounds, root)
            if into is not None:
                link.fold(op, source.dtype, rows_of(into, link.size), target)
        case Algorithm.EXCHANGE:
            yield from _in_slices(link, source, target, op, whole=True)
        case _:
            yield from _in_slices(link, source, target, op, root)


def reduce_scatter(link: Link, source: Flat, bounds: Sequence[int], target: Flat, op: str) -> Moves:
    """Fold everyone's elements bounds[r] to bounds[r + 1] into the `target` of rank r."""
    size = link.size
    if size == 1:
        link.fold(op, source.dtype, [_unaliased(source, target)], target)
        return
    longest = max(end - start for start, end in pairwise(bounds))
    cuts = list(_chunks(link, source[:longest], size))
    parts = [target[columns.start : columns.stop] for columns in cuts]
    halves = chunks.halves(link, len(cuts), size * max(map(len, parts), default=0), source.dtype)

    def begin(number: int) -> Handle:
        rows = halves[number & 1][: size * len(parts[number])]
        sent = columns_of(link, source, bounds, cuts[number])
        return link.alltoall(sent, in_order(rows, [len(parts[number])] * size))

    def fold(number: int) -> None:
        rows = halves[number & 1][: size * len(parts[number])]
        link.fold(op, source.dtype, rows_of(rows, size), parts[number])

    yield from chunks.one_by_one(link, len(cuts), begin, fold)


def scan(link: Link, source: Flat, target: Flat | None, op: str, inclusive: bool) -> Moves:
    """Fold the `source` of the ranks up to each into its `target`: with itself if `inclusive`.

    Each rank folds all prefixes of its slice. Exclusive, rank 0 has no target.
    """
    size = link.size
    cuts = [_bounds(chunk, size) for chunk in _chunks(link, source)]
    counts = [bounds[link.rank + 1] - bounds[link.rank] for bounds in cuts]
    halves = chunks.halves(link, len(cuts), 2 * size * max(counts, default=0), source.dtype)

    def parts(number: int) -> list[Flat]:
        return rows_of(halves[number & 1][: 2 * size * counts[number]], 2)

    def begin(number: int) -> Handle:
        into = in_order(parts(number)[0], [counts[number]] * size)
        return link.alltoall(blocks_of(source, cuts[number]), into)

    def fold(number: int) -> None:
        rows, outs = parts(number)
        link.prefixes(op, source.dtype, rows_of(rows, size), rows_of(outs, size))

    def after(number: int) -> Handle:
        # Exclusive, prefix r belongs to rank r + 1; the last belongs to nobody, and rank 0 gets none.
        lengths = [counts[number] if rank or inclusive else 0 for rank in range(size)]
        outs = in_order(parts(number)[1][: sum(lengths)], lengths)
        into = nothing(link) if target is None else blocks_of(target, cuts[number])
        return link.alltoall(outs, into)

    yield from chunks.one_by_one(link, len(cuts), begin, fold, after)


def gatherv(
    link: Link, source: Flat, target: Flat | None, bounds: Sequence[int], root: int | None
) -> Moves:
    """Collect everyone's `source` in the `target` of `root`, rank r's from element bounds[r].

    If `root` is None, every rank has a target.
    """
    if root is None:
        assert target is not None
        target[bounds[link.rank] : bounds[link.rank + 1]] = source
        yield from allgatherv(link, target, bounds)
        return
    if fit(bounds[-1] * source.itemsize):
        yield link.gather(raw(source), None if target is None else blocks_of(target, bounds), root)
        return
    for rank, piece in pieces_of(bounds, source.itemsize):
        first = piece.start - bounds[rank]
        mine = source[first : first + len(piece)] if rank == link.rank else source[:0]
        into = None if target is None else only(target[piece.start : piece.stop], rank, link.size)
        yield link.gather(raw(mine), into, root)


def scatterv(
    link: Link, source: Flat | None, target: Flat, bounds: Sequence[int], root: int
) -> Moves:
    """Give rank r the elements bounds[r] to bounds[r + 1] of the `source` of `root`."""
    if fit(bounds[-1] * target.itemsize):
        yield link.scatter(None if source is None else blocks_of(source, bounds), raw(target), root)
        return
    for rank, piece in pieces_of(bounds, target.itemsize):
        first = piece.start - bounds[rank]
        mine = target[first : first + len(piece)] if rank == link.rank else target[:0]
        part = None if source is None else only(source[piece.start : piece.stop], rank, link.size)
        yield link.scatter(part, raw(mine), root)


def alltoallv(
    link: Link,
    source: Flat,
    bounds: Sequence[int],
    target: Flat,
    into: Sequence[int],
    longest: int,
) -> Moves:
    """Send rank r the elements from bounds[r]; put what rank r sends from element into[r].

    `longest` is the length of the longest part between any two ranks, and the same on all.
    """
    rank, size = link.rank, link.size
    if fit(longest * size * source.itemsize):
        yield link.alltoall(blocks_of(source, bounds), blocks_of(target, into))
        return
    for shift in range(size):
        to, origin = (rank + shift) % size, (rank - shift) % size
        for _, piece in pieces_of([0, longest], source.itemsize):
            send = source[bounds[to] : bounds[to + 1]][piece.start : piece.stop]
            recv = target[into[origin] : into[origin + 1]][piece.start : piece.stop]
            yield link.alltoall(only(send, to, size), only(recv, origin, size))


def bcast(link: Link, buffer: Flat, root: int) -> Moves:
    """Make every rank's `buffer` that of `root`."""
    if link.size == 1:
        return
    for piece in cut(raw(buffer)):
        yield link.bcast(piece, root)


def allgatherv(link: Link, target: Flat, bounds: Sequence[int]) -> Moves:
    """Make every rank's part of `target`, elements bounds[r] to bounds[r + 1], known to all.

    Each rank has written its own part beforehand.
    """
    if link.size == 1:
        return
    if fit(target.nbytes):
        yield link.allgather(blocks_of(target, bounds))
        return
    for rank in range(link.size):
        yield from bcast(link, target[bounds[rank] : bounds[rank + 1]], rank)


def _in_steps(link: Link, source: Flat, target: Flat | None, op: str) -> Moves:
    """Show a slot's worth to all ranks at a time; who has a target folds what all ranks show."""
    assert isinstance(link, Transport)
    control, dtype = link.control, source.dtype
    count = control.payload // dtype.itemsize
    for start in range(0, len(source), count):
        piece = slice(start, start + count)
        shown = raw(source[piece])
        control.mine[(control.step + 1) & 1][PAYLOAD : PAYLOAD + len(shown)] = shown.data
        control.post(len(shown))
        yield control
        if target is not None:
            rows = control.rows[control.step & 1][:, PAYLOAD : PAYLOAD + len(shown)]
            link.fold(op, dtype, [row.view(dtype) for row in rows], target[piece])


def _in_slices(
    link: Link,
    source: Flat,
    target: Flat,
    op: str,
    root: int | None = None,
    whole: bool = False,
) -> Moves:
    """Fold a slice of each chunk on each rank, for all ranks, or for a root, which alone has a target then.

    If it is `whole`, each rank gets and folds all of the chunk, and nothing moves after that.
    """
    size, rank, dtype = link.size, link.rank, source.dtype
    if not link.overlaps:
        ranges = _chunks(link, source)
    else:
        chunk = chunks.overlapping_chunk(source.nbytes, size, link.crossovers.chunk)
        ranges = _ranges(len(source), max(chunk // source.itemsize, size))
    cuts = [[r.start, r.stop] if whole else _bounds(r, size) for r in ranges]
    owns = [slice(*(cut if whole else cut[rank : rank + 2])) for cut in cuts]
    longest = max((own.stop - own.start for own in owns), default=0)
    halves = chunks.halves(link, len(cuts), size * longest, dtype)
    # What goes to a root is still on its way while the next chunk is folded.
    results = [] if root is None else rows_of(link.empty(2 * longest, dtype), 2)
    aliased = root is None and overlap(source, target)

    def part(number: int) -> Flat:
        own = owns[number]
        return results[number & 1][: own.stop - own.start] if results else target[own]

    def begin(number: int) -> Handle:
        own = source[owns[number]]
        counts = [0 if peer == rank else len(own) for peer in range(size)]
        sent = Blocks(raw(own), [n * source.itemsize for n in counts], [0] * size)
        if not whole:
            sent = blocks_of(source, cuts[number])
            sent = sent._replace(counts=[n * (r != rank) for r, n in enumerate(sent.counts)])
        return link.alltoall(sent, in_order(halves[number & 1], counts))

    def fold(number: int) -> None:
        own, into = source[owns[number]], part(number)
        *rows, spare = rows_of(halves[number & 1][: size * len(into)], size)
        if aliased:
            spare[...] = own
        rows.insert(rank, spare if aliased else own)
        link.fold(op, dtype, rows, into)

    def after(number: int) -> Handle:
        if root is None:
            return link.allgather(blocks_of(target, cuts[number]))
        into = None if target is None else blocks_of(target, cuts[number])
        return link.gather(raw(part(number)), into, root)

    yield from chunks.one_by_one(link, len(cuts), begin, fold, None if whole else after)


def _chunks(link: Link, array: Flat, rows: int = 1) -> Iterator[range]:
    """Cut `array`, of which `rows` are moved at once, into ranges that are small enough."""
    step = (link.chunk_bytes or selection.CHUNK_BYTES) // (array.itemsize * rows)
    return _ranges(len(array), max(step, link.size // rows))


def _ranges(count: int, step: int) -> Iterator[range]:
    for start in range(0, count, step):
        yield range(start, min(start + step, count))


def _bounds(chunk: range, size: int) -> list[int]:
    """Where each rank's slice of the chunk starts, and where the last one ends."""
    count = len(chunk)
    return [chunk.start + count * rank // size for rank in range(size + 1)]


def _unaliased(source: Flat, target: Flat) -> Flat:
    return source.copy() if overlap(source, target) else source


def overlap(one: Flat, other: Flat) -> bool:
    """Tell whether two pieces of contiguous memory have a byte in common."""
    if isinstance(one, DeviceBuffer) and isinstance(other, DeviceBuffer):
        return one.shares(other)
    return not isinstance(one, DeviceBuffer) and bool(np.may_share_memory(one, other))
