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
    algorithm = select(link, op, source.dtype, source.nbytes).algorithm
    if algorithm is Algorithm.SEGMENT:
        if found := (yield from segment.streaming_segment_of(link)):
            yield from found.reduce(segment.chunk_tasks(found, source, target), op)
            return
        algorithm = selection.without_segment(link, source.nbytes)
    match algorithm:
        case Algorithm.NATIVE:
            yield link.allreduce(source, target, op)
        case Algorithm.LOCAL:
            link.fold(op, source.dtype, [_unaliased(source, target)], target)
        case Algorithm.HEADER | Algorithm.STEPS:
            yield from _in_steps(link, source, target, op)
        case Algorithm.GATHER:
            rows = yield from _gather_rows(link, source)
            link.fold(op, source.dtype, rows, target)
        case Algorithm.EXCHANGE:
            yield from _in_overlapping_exchanges(link, source, target, op)
        case _ if link.overlaps:
            yield from _in_overlapping_slices(link, source, target, op)
        case _:
            for chunk in _chunks(link, source):
                bounds = _bounds(chunk, link.size)
                part = target[bounds[link.rank] : bounds[link.rank + 1]]
                yield from _fold_slice(link, source, part, bounds, op)
                yield link.allgather(blocks_of(target, bounds))


def reduce(link: Link, source: Flat, target: Flat | None, op: str, root: int) -> Moves:
    """Fold all ranks' `source` into the `target` of `root`; the others pass None."""
    match selection.choose(source.nbytes, link.size, *link.slot):
        case Algorithm.LOCAL:
            assert target is not None
            link.fold(op, source.dtype, [_unaliased(source, target)], target)
        case Algorithm.HEADER | Algorithm.STEPS:
            yield from _in_steps(link, source, target, op)
        case Algorithm.GATHER:
            into = None if target is None else link.take(link.size * len(source), source.dtype)
            counts = [len(source)] * link.size
            yield link.gather(raw(source), None if into is None else in_order(into, counts), root)
            if target is not None and into is not None:
                link.fold(op, source.dtype, rows_of(into, link.size), target)
        case _:
            for chunk in _chunks(link, source):
                bounds = _bounds(chunk, link.size)
                part = link.empty(bounds[link.rank + 1] - bounds[link.rank], source.dtype)
                yield from _fold_slice(link, source, part, bounds, op)
                into_blocks = None if target is None else blocks_of(target, bounds)
                yield link.gather(raw(part), into_blocks, root)


def reduce_scatter(link: Link, source: Flat, bounds: Sequence[int], target: Flat, op: str) -> Moves:
    """Fold everyone's elements bounds[r] to bounds[r + 1] into the `target` of rank r."""
    size = link.size
    if size == 1:
        link.fold(op, source.dtype, [_unaliased(source, target)], target)
        return
    longest = max(end - start for start, end in pairwise(bounds))
    for columns in _chunks(link, source[:longest], size):
        part = target[columns.start : columns.stop]
        rows = link.take(size * len(part), source.dtype)
        sent = columns_of(link, source, bounds, columns)
        yield link.alltoall(sent, in_order(rows, [len(part)] * size))
        link.fold(op, source.dtype, rows_of(rows, size), part)


def scan(link: Link, source: Flat, target: Flat | None, op: str, inclusive: bool) -> Moves:
    """Fold the `source` of the ranks up to each into its `target`: with itself if `inclusive`.

    Each rank folds all prefixes of its slice. Exclusive, rank 0 has no target.
    """
    size = link.size
    for chunk in _chunks(link, source):
        bounds = _bounds(chunk, size)
        count = bounds[link.rank + 1] - bounds[link.rank]
        rows, outs = rows_of(link.take(2 * size * count, source.dtype), 2)
        yield link.alltoall(blocks_of(source, bounds), in_order(rows, [count] * size))
        link.prefixes(op, source.dtype, rows_of(rows, size), rows_of(outs, size))
        counts = [count] * size
        if not inclusive:
            # Prefix r belongs to rank r + 1; the last belongs to nobody, and rank 0 gets none.
            counts[0] = 0
        yield link.alltoall(
            in_order(outs[: sum(counts)], counts),
            nothing(link) if target is None else blocks_of(target, bounds),
        )


def gatherv(
    link: Link, source: Flat, target: Flat | None, bounds: Sequence[int], root: int
) -> Moves:
    """Collect everyone's `source` in the `target` of `root`, rank r's from element bounds[r]."""
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


def _in_overlapping_slices(link: Link, source: Flat, target: Flat, op: str) -> Moves:
    """Fold a slice of each chunk while the next chunk's slices, and the folded ones before, are under way."""
    size, rank, dtype = link.size, link.rank, source.dtype
    chunk = chunks.overlapping_chunk(source.nbytes, size, link.crossovers.chunk)
    step = chunk // source.itemsize
    cuts = [_bounds(chunk, size) for chunk in _ranges(len(source), max(step, size))]
    longest = max(bounds[rank + 1] - bounds[rank] for bounds in cuts)
    scratch = link.take((1 + min(2, len(cuts)) * (size - 1)) * longest, dtype)
    halves = rows_of(scratch[longest:], min(2, len(cuts)))
    aliased = overlap(source, target)
    gathering: Handle | None = None
    scattered: list[Handle] = []
    for number, bounds in enumerate(cuts):
        if number == 0:
            scattered.append(_scatter(link, source, bounds, halves[0]))
        if number + 1 < len(cuts):
            into = halves[(number + 1) & 1]
            scattered.append(_scatter(link, source, cuts[number + 1], into))
        yield scattered.pop(0)
        own = slice(bounds[rank], bounds[rank + 1])
        count = own.stop - own.start
        rows = rows_of(halves[number & 1][: (size - 1) * count], size - 1)
        if aliased:
            scratch[:count] = source[own]
        rows.insert(rank, scratch[:count] if aliased else source[own])
        link.fold(op, dtype, rows, target[own])
        if gathering is not None:
            yield gathering
        gathering = link.allgather(blocks_of(target, bounds))
    assert gathering is not None
    yield gathering


def _in_overlapping_exchanges(link: Link, source: Flat, target: Flat, op: str) -> Moves:
    """Fold all ranks' elements of a chunk while those of the next one are under way."""
    size, rank, dtype = link.size, link.rank, source.dtype
    chunk = chunks.overlapping_chunk(source.nbytes, size, link.crossovers.chunk)
    step = max(chunk // source.itemsize, 1)
    cuts = [slice(chunk.start, chunk.stop) for chunk in _ranges(len(source), step)]
    scratch = link.take((2 * size - 1) * step, dtype)
    halves = rows_of(scratch[step:], 2)
    aliased = overlap(source, target)

    def begin(number: int) -> Handle:
        part = source[cuts[number]]
        counts = [0 if peer == rank else len(part) for peer in range(size)]
        own = raw(part)
        sent = Blocks(own, [0 if peer == rank else len(own) for peer in range(size)], [0] * size)
        return link.alltoall(sent, in_order(halves[number & 1][: sum(counts)], counts))

    handle = begin(0)
    for number, part in enumerate(cuts):
        after = begin(number + 1) if number + 1 < len(cuts) else None
        yield handle
        count = len(source[part])
        rows = rows_of(halves[number & 1][: (size - 1) * count], size - 1)
        if aliased:
            scratch[:count] = source[part]
        rows.insert(rank, scratch[:count] if aliased else source[part])
        link.fold(op, dtype, rows, target[part])
        if after is not None:
            handle = after


def _scatter(link: Link, source: Flat, bounds: Sequence[int], into: Flat) -> Handle:
    """Send the other ranks their slices of a chunk, and receive this rank's slice of each."""
    count = bounds[link.rank + 1] - bounds[link.rank]
    counts = [0 if rank == link.rank else count for rank in range(link.size)]
    sent = blocks_of(source, bounds)
    lengths = [0 if rank == link.rank else n for rank, n in enumerate(sent.counts)]
    return link.alltoall(sent._replace(counts=lengths), in_order(into, counts))


def _fold_slice(link: Link, source: Flat, part: Flat, bounds: Sequence[int], op: str) -> Moves:
    """Collect this rank's slice of a chunk from all ranks, and fold it into `part`."""
    count = bounds[link.rank + 1] - bounds[link.rank]
    rows = link.take(link.size * count, source.dtype)
    yield link.alltoall(blocks_of(source, bounds), in_order(rows, [count] * link.size))
    link.fold(op, source.dtype, rows_of(rows, link.size), part)


def _gather_rows(link: Link, source: Flat) -> Generator[Handle, None, list[Flat]]:
    into = link.take(link.size * len(source), source.dtype)
    rows = rows_of(into, link.size)
    rows[link.rank][...] = source
    yield link.allgather(in_order(into, [len(source)] * link.size))
    return rows


def _chunks(link: Link, array: Flat, rows: int = 1) -> Iterator[range]:
    """Cut `array`, of which `rows` are moved at once, into ranges that are small enough."""
    step = (link.chunk_bytes or selection.CHUNK_BYTES) // (array.itemsize * rows)
    return _ranges(len(array), max(step, link.size))


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
