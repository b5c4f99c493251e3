"""How each collective moves its data, written once over the transport's movements.

Every function is a generator: it yields what it waits for, so that one thread can drive several
calls, blocking or not. Sources and targets are one-dimensional, contiguous arrays of one dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from arraycomm._reduce import chain, chunks, segment, selection
from arraycomm._reduce.blocks import (
    blocks_of,
    bounds_of,
    columns_of,
    cut,
    fit,
    in_order,
    only,
    overlap,
    pieces_of,
    raw,
    rows_of,
)
from arraycomm._reduce.selection import Algorithm, select
from arraycomm._transports.base import Blocks, Flat, Handle, Link, Steps, Transport
from arraycomm._transports.control import PAYLOAD

# Through which memory chunks go, opened by the first call; None if that is not possible.
_SEGMENTS: Final = {
    Algorithm.SEGMENT: segment.streaming_segment_of,
    Algorithm.CHAIN: chain.segment_of,
}


def allreduce(link: Link, source: Flat, target: Flat, op: str) -> Steps:
    """Fold all ranks' `source` into every rank's `target`; the two may be the same memory."""
    algorithm = select(link, op, source.dtype, source.nbytes)
    if algorithm is Algorithm.NATIVE:
        yield link.allreduce(source, target, op)
        return
    if algorithm in _SEGMENTS:
        if found := (yield from _SEGMENTS[algorithm](link)):
            yield from found.reduce_array(source, target, op)
            return
        algorithm = selection.without_segment(link, source.nbytes)
    yield from _reduce_by(algorithm, link, source, target, op)


def reduce(link: Link, source: Flat, target: Flat | None, op: str, root: int) -> Steps:
    """Fold all ranks' `source` into the `target` of `root`; the others pass None."""
    algorithm = selection.without_segment(link, source.nbytes)
    yield from _reduce_by(algorithm, link, source, target, op, root)


def _reduce_by(
    algorithm: Algorithm,
    link: Link,
    source: Flat,
    target: Flat | None,
    op: str,
    root: int | None = None,
) -> Steps:
    """Fold into the `target` of `root`, which alone has one, or of every rank if that is None."""
    link.load(op, source.dtype)
    match algorithm:
        case Algorithm.LOCAL:
            link.fold(op, source.dtype, [_unaliased(source, target)], target)
        case Algorithm.HEADER:
            yield from _in_a_step(link, source, target, op)
        case Algorithm.GATHER:
            into = None if target is None else link.take(link.size * len(source), source.dtype)
            bounds = bounds_of([len(source)] * link.size)
            yield from gatherv(link, source, into, bounds, root)
            if into is not None:
                link.fold(op, source.dtype, rows_of(into, link.size), target)
        case _:
            yield from _in_slices(link, [(source, target)], op, root)


def allreduce_in_turn(link: Link, pairs: Sequence[tuple[Flat, Flat]], op: str) -> Steps:
    """Do what `allreduce` does for each source and its target; all have one dtype.

    By slices, the chunks of one pair are under way while those of the one before are folded.
    """
    nbytes, dtype = sum(source.nbytes for source, _ in pairs), pairs[0][0].dtype
    if select(link, op, dtype, nbytes) is Algorithm.SLICES:
        yield from _in_slices(link, pairs, op)
        return
    for source, target in pairs:
        yield from allreduce(link, source, target, op)


def reduce_scatter(link: Link, source: Flat, bounds: Sequence[int], target: Flat, op: str) -> Steps:
    """Fold everyone's elements bounds[r] to bounds[r + 1] into the `target` of rank r."""
    size = link.size
    link.load(op, source.dtype)
    if size == 1:
        link.fold(op, source.dtype, [_unaliased(source, target)], target)
        return
    longest = max(end - start for start, end in pairwise(bounds))
    cuts = chunks.ranges(link, source[:longest], size)
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


def gatherv(
    link: Link, source: Flat, target: Flat | None, bounds: Sequence[int], root: int | None
) -> Steps:
    """Collect everyone's `source` in the `target` of `root`, rank r's from element bounds[r].

    If `root` is None, every rank has a target.
    """
    if root is None:
        assert target is not None
        target[bounds[link.rank] : bounds[link.rank + 1]] = source
        yield from allgatherv(link, target, bounds)
        return
    for own, into in _parts(link, source, target, bounds):
        yield link.gather(own, into, root)


def scatterv(
    link: Link, source: Flat | None, target: Flat, bounds: Sequence[int], root: int
) -> Steps:
    """Give rank r the elements bounds[r] to bounds[r + 1] of the `source` of `root`."""
    for own, sent in _parts(link, target, source, bounds):
        yield link.scatter(sent, own, root)


def _parts(
    link: Link, own: Flat, whole: Flat | None, bounds: Sequence[int]
) -> Iterator[tuple[Flat, Blocks | None]]:
    """Yield this rank's part and, on the root, all parts, in as many movements as they need."""
    if fit(bounds[-1] * own.itemsize):
        yield raw(own), None if whole is None else blocks_of(whole, bounds)
        return
    for rank, piece in pieces_of(bounds, own.itemsize):
        first = piece.start - bounds[rank]
        mine = own[first : first + len(piece)] if rank == link.rank else own[:0]
        part = None if whole is None else only(whole[piece.start : piece.stop], rank, link.size)
        yield raw(mine), part


def alltoallv(
    link: Link, source: Flat, bounds: Sequence[int], target: Flat, into: Sequence[int], longest: int
) -> Steps:
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


def bcast(link: Link, buffer: Flat, root: int) -> Steps:
    """Make every rank's `buffer` that of `root`."""
    if link.size == 1:
        return
    for piece in cut(raw(buffer)):
        yield link.bcast(piece, root)


def allgatherv(link: Link, target: Flat, bounds: Sequence[int]) -> Steps:
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


def _in_a_step(link: Link, source: Flat, target: Flat | None, op: str) -> Steps:
    """Show everything to all ranks in their slots; who has a target folds it."""
    assert isinstance(link, Transport)
    control, shown = link.control, raw(source)
    end = PAYLOAD + len(shown)
    control.mine[(control.step + 1) & 1][PAYLOAD:end] = shown.data
    control.post(len(shown))
    yield control
    if target is not None:
        rows = control.rows[control.step & 1][:, PAYLOAD:end]
        link.fold(op, source.dtype, [row.view(source.dtype) for row in rows], target)


def _in_slices(
    link: Link, pairs: Sequence[tuple[Flat, Flat | None]], op: str, root: int | None = None
) -> Steps:
    """Fold a slice of each chunk on each rank, for all ranks or a root, which alone has targets."""
    size, rank, dtype = link.size, link.rank, pairs[0][0].dtype
    nbytes = sum(source.nbytes for source, _ in pairs)
    pieces = [(cut, *pair) for pair in pairs for cut in chunks.cuts_of(link, pair[0], nbytes)]
    longest = max((cut.longest for cut, *_ in pieces), default=0)
    halves = chunks.halves(link, len(pieces), size * longest, dtype)
    # What goes to a root is still on its way while the next chunk is folded.
    results = [] if root is None else rows_of(link.empty(2 * longest, dtype), 2)

    def part(number: int) -> Flat:
        cut, _, target = pieces[number]
        if root is not None:
            return results[number & 1][: cut.own.stop - cut.own.start]
        assert target is not None
        return target[cut.own]

    def begin(number: int) -> Handle:
        cut, source, _ = pieces[number]
        sent = Blocks(raw(source[cut.chunk]), cut.sent, cut.offsets)
        return link.alltoall(sent, Blocks(raw(halves[number & 1]), cut.come, cut.places))

    def fold(number: int) -> None:
        cut, source, _ = pieces[number]
        own, into = source[cut.own], part(number)
        *rows, spare = rows_of(halves[number & 1][: size * len(into)], size)
        aliased = overlap(own, into)
        if aliased:
            spare[...] = own
        rows.insert(rank, spare if aliased else own)
        link.fold(op, dtype, rows, into)

    def after(number: int) -> Handle:
        cut, _, target = pieces[number]
        into = None if target is None else Blocks(raw(target[cut.chunk]), cut.counts, cut.offsets)
        if root is not None:
            return link.gather(raw(part(number)), into, root)
        assert into is not None
        return link.allgather(into)

    yield from chunks.one_by_one(link, len(pieces), begin, fold, after)


def _unaliased(source: Flat, target: Flat) -> Flat:
    return source.copy() if overlap(source, target) else source
