"""How each collective moves its data, written once over the transport's movements.

Every function is a generator: it yields what it waits for, so that one thread can drive several
calls, blocking or not. Sources and targets are one-dimensional, contiguous arrays of one dtype.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise

import numpy as np

from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._collectives import selection
from arraycomm._collectives.selection import Algorithm, select
from arraycomm._transports.base import MAX_BYTES, Blocks, Flat, Handle, Link, Transport
from arraycomm._transports.control import PAYLOAD

Moves = Generator[Handle, None, None]


def allreduce(link: Link, source: Flat, target: Flat, op: str) -> Moves:
    """Fold all ranks' `source` into every rank's `target`; the two may be the same memory."""
    match select(link, op, source.dtype, source.nbytes).algorithm:
        case Algorithm.NATIVE:
            yield link.allreduce(source, target, op)
        case Algorithm.LOCAL:
            link.fold(op, source.dtype, [_unaliased(source, target)], target)
        case Algorithm.HEADER | Algorithm.STEPS:
            yield from _in_steps(link, source, target, op)
        case Algorithm.GATHER:
            rows = yield from _gather_rows(link, source)
            link.fold(op, source.dtype, rows, target)
        case _:
            for chunk in _chunks(link, source):
                bounds = _bounds(chunk, link.size)
                part = target[bounds[link.rank] : bounds[link.rank + 1]]
                yield from _fold_slice(link, source, part, bounds, op)
                yield link.allgather(_blocks(target, bounds))


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
            yield link.gather(_bytes(source), None if into is None else _even(into, counts), root)
            if target is not None and into is not None:
                link.fold(op, source.dtype, _rows(into, link.size), target)
        case _:
            for chunk in _chunks(link, source):
                bounds = _bounds(chunk, link.size)
                part = link.empty(bounds[link.rank + 1] - bounds[link.rank], source.dtype)
                yield from _fold_slice(link, source, part, bounds, op)
                into_blocks = None if target is None else _blocks(target, bounds)
                yield link.gather(_bytes(part), into_blocks, root)


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
        sent = _columns(link, source, bounds, columns)
        yield link.alltoall(sent, _even(rows, [len(part)] * size))
        link.fold(op, source.dtype, _rows(rows, size), part)


def scan(link: Link, source: Flat, target: Flat | None, op: str, inclusive: bool) -> Moves:
    """Fold the `source` of the ranks up to each into its `target`: with itself if `inclusive`.

    Each rank folds all prefixes of its slice. Exclusive, rank 0 has no target.
    """
    size = link.size
    for chunk in _chunks(link, source):
        bounds = _bounds(chunk, size)
        count = bounds[link.rank + 1] - bounds[link.rank]
        rows, outs = _rows(link.take(2 * size * count, source.dtype), 2)
        yield link.alltoall(_blocks(source, bounds), _even(rows, [count] * size))
        link.prefixes(op, source.dtype, _rows(rows, size), _rows(outs, size))
        counts = [count] * size
        if not inclusive:
            # Prefix r belongs to rank r + 1; the last belongs to nobody, and rank 0 gets none.
            counts[0] = 0
        yield link.alltoall(
            _even(outs[: sum(counts)], counts),
            _nothing(link) if target is None else _blocks(target, bounds),
        )


def gatherv(
    link: Link, source: Flat, target: Flat | None, bounds: Sequence[int], root: int
) -> Moves:
    """Collect everyone's `source` in the `target` of `root`, rank r's from element bounds[r]."""
    if bounds[-1] * source.itemsize <= MAX_BYTES:
        yield link.gather(_bytes(source), None if target is None else _blocks(target, bounds), root)
        return
    for rank, piece in _pieces(bounds, source.itemsize):
        first = piece.start - bounds[rank]
        mine = source[first : first + len(piece)] if rank == link.rank else source[:0]
        into = None if target is None else _one(target[piece.start : piece.stop], rank, link.size)
        yield link.gather(_bytes(mine), into, root)


def scatterv(
    link: Link, source: Flat | None, target: Flat, bounds: Sequence[int], root: int
) -> Moves:
    """Give rank r the elements bounds[r] to bounds[r + 1] of the `source` of `root`."""
    if bounds[-1] * target.itemsize <= MAX_BYTES:
        yield link.scatter(
            None if source is None else _blocks(source, bounds), _bytes(target), root
        )
        return
    for rank, piece in _pieces(bounds, target.itemsize):
        first = piece.start - bounds[rank]
        mine = target[first : first + len(piece)] if rank == link.rank else target[:0]
        part = None if source is None else _one(source[piece.start : piece.stop], rank, link.size)
        yield link.scatter(part, _bytes(mine), root)


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
    if longest * size * source.itemsize <= MAX_BYTES:
        yield link.alltoall(_blocks(source, bounds), _blocks(target, into))
        return
    for shift in range(size):
        to, origin = (rank + shift) % size, (rank - shift) % size
        for _, piece in _pieces([0, longest], source.itemsize):
            send = source[bounds[to] : bounds[to + 1]][piece.start : piece.stop]
            recv = target[into[origin] : into[origin + 1]][piece.start : piece.stop]
            yield link.alltoall(_one(send, to, size), _one(recv, origin, size))


def bcast(link: Link, buffer: Flat, root: int) -> Moves:
    """Make every rank's `buffer` that of `root`."""
    if link.size == 1:
        return
    raw = _bytes(buffer)
    for start in range(0, len(raw), MAX_BYTES):
        yield link.bcast(raw[start : start + MAX_BYTES], root)


def allgatherv(link: Link, target: Flat, bounds: Sequence[int]) -> Moves:
    """Make every rank's part of `target`, elements bounds[r] to bounds[r + 1], known to all.

    Each rank has written its own part beforehand.
    """
    if link.size == 1:
        return
    if target.nbytes <= MAX_BYTES:
        yield link.allgather(_blocks(target, bounds))
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
        shown = _bytes(source[piece])
        control.mine[(control.step + 1) & 1][PAYLOAD : PAYLOAD + len(shown)] = shown.data
        control.post()
        yield control
        if target is not None:
            rows = control.rows[control.step & 1][:, PAYLOAD : PAYLOAD + len(shown)]
            link.fold(op, dtype, [row.view(dtype) for row in rows], target[piece])


def _fold_slice(link: Link, source: Flat, part: Flat, bounds: Sequence[int], op: str) -> Moves:
    """Collect this rank's slice of a chunk from all ranks, and fold it into `part`."""
    count = bounds[link.rank + 1] - bounds[link.rank]
    rows = link.take(link.size * count, source.dtype)
    yield link.alltoall(_blocks(source, bounds), _even(rows, [count] * link.size))
    link.fold(op, source.dtype, _rows(rows, link.size), part)


def _gather_rows(link: Link, source: Flat) -> Generator[Handle, None, list[Flat]]:
    into = link.take(link.size * len(source), source.dtype)
    rows = _rows(into, link.size)
    rows[link.rank][...] = source
    yield link.allgather(_even(into, [len(source)] * link.size))
    return rows


def _rows(array: Flat, count: int) -> list[Flat]:
    """Cut memory into `count` rows of one length."""
    length = len(array) // count
    return [array[row * length : (row + 1) * length] for row in range(count)]


def _chunks(link: Link, array: Flat, rows: int = 1) -> Iterator[range]:
    """Cut `array`, of which `rows` are moved at once, into ranges that are small enough."""
    step = max((link.chunk_bytes or selection.CHUNK_BYTES) // (array.itemsize * rows), link.size)
    for start in range(0, len(array), step):
        yield range(start, min(start + step, len(array)))


def _bounds(chunk: range, size: int) -> list[int]:
    """Where each rank's slice of the chunk starts, and where the last one ends."""
    count = len(chunk)
    return [chunk.start + count * rank // size for rank in range(size + 1)]


def _blocks(array: Flat, bounds: Sequence[int]) -> Blocks:
    """Elements bounds[r] to bounds[r + 1] of the array, as blocks of bytes."""
    itemsize, first = array.itemsize, bounds[0]
    offsets = [(bound - first) * itemsize for bound in bounds]
    counts = [end - start for start, end in pairwise(offsets)]
    return Blocks(_bytes(array[first : bounds[-1]]), counts, offsets[:-1])


def _columns(link: Link, array: Flat, bounds: Sequence[int], columns: range) -> Blocks:
    """The elements at `columns` of each rank's part of an array, as far as it has them."""
    parts = [range(begin, end)[columns.start : columns.stop] for begin, end in pairwise(bounds)]
    counts = [len(part) for part in parts]
    if array.nbytes > MAX_BYTES:
        packed = _even(link.empty(sum(counts), array.dtype), counts)
        for rank, part in enumerate(parts):
            packed.block(rank)[...] = _bytes(array[part.start : part.stop])
        return packed
    size = array.itemsize
    return Blocks(_bytes(array), [n * size for n in counts], [part.start * size for part in parts])


def _pieces(bounds: Sequence[int], itemsize: int) -> Iterator[tuple[int, range]]:
    """Each part, and the elements of a piece of it that one movement can take."""
    step = MAX_BYTES // itemsize
    for rank, (begin, end) in enumerate(pairwise(bounds)):
        for start in range(begin, end, step):
            yield rank, range(start, min(start + step, end))


def _one(array: Flat, rank: int, size: int) -> Blocks:
    """The whole array for one rank, nothing for the others."""
    counts = [array.nbytes if other == rank else 0 for other in range(size)]
    return Blocks(_bytes(array), counts, [0] * size)


def _nothing(link: Link) -> Blocks:
    return Blocks(link.empty(0, np.dtype(np.uint8)), [0] * link.size, [0] * link.size)


def _even(array: Flat, counts: Sequence[int]) -> Blocks:
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return _blocks(array, bounds)


def _bytes(array: Flat) -> Flat:
    return array.view(np.uint8)


def _unaliased(source: Flat, target: Flat) -> Flat:
    return source.copy() if overlap(source, target) else source


def overlap(one: Flat, other: Flat) -> bool:
    """Tell whether two pieces of contiguous memory have a byte in common."""
    if isinstance(one, DeviceBuffer) and isinstance(other, DeviceBuffer):
        return one.shares(other)
    return not isinstance(one, DeviceBuffer) and bool(np.may_share_memory(one, other))
