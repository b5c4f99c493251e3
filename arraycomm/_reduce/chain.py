"""Reductions over a chain of nodes: each folds its ranks' elements onto the total of those before.

The total of a chunk goes from the first node to the last one, and the result goes back, so that a
node's link carries each element once in each direction, however many ranks the node has. The ranks
of a node publish their elements in a shared segment. Each of them folds and sends a part of every
chunk, and copies in what others fold.

The chunks follow one another through the nodes. A node publishes chunk k in its turn k, folds it in
turn k + 1, and has its result in turn k + 2 (N - i) - 1 if it is node i of N; or in turn k + K of K
chunks, if that is earlier. A turn is a step of the node's own control channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from math import isqrt
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array, allocate
from arraycomm._dtypes import DType
from arraycomm._folds import goes_on, total_dtype
from arraycomm._native import compiled
from arraycomm._protocol.details import exchange_details
from arraycomm._reduce.segment import (
    FOLDED,
    ROWS,
    ChunkTask,
    MemoryOpened,
    SharedSegment,
    Targets,
    own_part,
    share,
)
from arraycomm._transports.base import Bytes, Flat, Handle, Link, NodeChain, Steps, Transport

# The bytes of a chunk at most, if the segment of a node has at most this many then; and at least.
_CHUNK: Final = 1 << 20
_SEGMENT: Final = 64 << 20
_LEAST_CHUNK: Final = 16 << 10
# The bytes that a node publishes, folds, sends and copies in the time of a turn that moves nothing.
_WORKED: Final = 320 << 10
# The messages of slices that take as long as a turn, and the bytes that a link takes in the time of
# one of them.
_MESSAGES: Final = 16
_MESSAGE: Final = 256 << 10
# Of the results, one is asked for, one has come, two may still be copied from, and one is still
# sent on.
_RESULTS: Final = FOLDED + 2
_LINE: Final = 64
# The most bytes of a total for each byte of an element.
_WIDEST: Final = 4
# Results of more bytes would only push one another out of the caches.
_LARGE: Final = 8 << 20
# Of more ranks, each copies in its own part as well, so that all rows lie at the same distance.
_MANY: Final = 16


def is_preferred(transport: Transport, op: str, dtypes: Iterable[DType], nbytes: int) -> bool:
    """Return whether elements of these dtypes are better reduced along a chain than by slices.

    An exact sum has no total that could go from node to node: one rank folds a slice of all ranks'
    elements.
    """
    chain = transport.chain
    if chain is None or not goes_on(op):
        return False
    widest = max(total_dtype(dtype).itemsize // dtype.itemsize for dtype in dtypes)
    return is_quicker(nbytes, chain.nodes, chain.lanes, widest)


def is_quicker(nbytes: int, nodes: int, lanes: int, widest: int) -> bool:
    """Return whether a chain is quicker than slices, on this many nodes of this many ranks.

    By slices, a node gets the elements of all ranks for the slices of its own, and further slices
    of the result. Along the chain it gets a total, which is `widest` times as wide as the elements,
    and the result: of two nodes one of these. But each node waits for the one before it.
    """
    by_slices = (lanes + 1) * (nodes - 1) / nodes
    saved = by_slices - (widest if nodes == 2 else widest + 1)
    return saved > 0 and nbytes * saved >= (nodes - 2) * max(_MESSAGES - lanes, 0) * _MESSAGE


def chunk_bytes(nbytes: int, nodes: int, largest: int) -> int:
    """Return the bytes of a chunk of this many bytes in all; they are about equally long.

    All turns together take the least time if the chunks have the square root of nbytes · `_WORKED`
    / the turns that the first one takes.
    """
    best = max(isqrt(nbytes * _WORKED // (1 + nodes)), _LEAST_CHUNK)
    count = max(nbytes // min(best, largest), -(-nbytes // largest), 1)
    return min(max(-(-nbytes // (64 * count)), 1) * 64, largest)


def largest_chunk(most: int) -> int:
    """Return the bytes of the largest chunk in the segment of a node with up to this many ranks."""
    rows = ROWS * most + _RESULTS
    return max(min(_CHUNK, _SEGMENT // rows // 4096 * 4096), _LEAST_CHUNK)


class ChainSegment(SharedSegment):
    """The shared segment of a node, whose chunks go on along the chain."""

    chained = True

    def __init__(self, chain: NodeChain, memory: Bytes) -> None:
        self.chain, self.control = chain, chain.control
        self.chunk_bytes = largest_chunk(chain.most)
        size = chain.control.size
        rows = memory.reshape(-1, self.chunk_bytes)
        self.rows = rows[: ROWS * size].reshape(ROWS, size, self.chunk_bytes)
        self.results = rows[ROWS * size :]
        # Two totals that come, and two that go: whole elements of any dtype, of a part that may
        # have one more.
        part = (self.chunk_bytes // (chain.lanes * _LINE) + 2) * _LINE
        self.totals = allocate((4, part * _WIDEST), np.dtype(np.uint8))

    @staticmethod
    def nbytes_of(chain: NodeChain) -> int:
        """Return the bytes of memory that the ranks of this node share."""
        return (ROWS * chain.control.size + _RESULTS) * largest_chunk(chain.most)

    def chunk_for(self, nbytes: int) -> int:
        return chunk_bytes(nbytes, self.chain.nodes, self.chunk_bytes)

    def own(self, count: int) -> slice:
        place, lanes = self.control.rank, self.chain.lanes
        return own_part(count, place, lanes) if place < lanes else slice(0, 0)

    def reduce_array(self, source: Flat, target: Flat, op: str) -> Steps:
        return self.reduce(chunk_tasks(self, source, target), op)

    def reduce(self, chunk_tasks: Iterable[ChunkTask], op: str) -> Steps:
        chain = self.chain
        call = _Call(self, list(chunk_tasks), op)
        count = len(call.tasks)
        delay = min(2 * (chain.nodes - chain.node) - 1, count)
        nbytes = sum(task.rows[0].nbytes for task in call.tasks)
        copy = np.copyto if compiled is None or nbytes <= _LARGE else compiled.copy
        for turn in range(count + delay + 1):
            if turn < count:
                call.tasks[turn].fill()
            if turn:
                yield self.control
            if chain.carries:
                if 0 < turn <= count:
                    yield from call.fold(turn - 1)
                yield from call.take_result(turn - delay)
                # Others of this node may have another part of it then.
                yield from call.sent_result(turn - delay + 2)
            if turn < count + delay:
                self.control.post()
            if turn > delay:
                number = turn - delay - 1
                folded = call.results_of(number)
                for part, target in call.tasks[number].targets():
                    copy(target, folded[part])
        yield from call.finish()


class _Memory:
    """Memory for chunks of one length: the results, and this rank's parts of totals and results."""

    def __init__(self, segment: ChainSegment, length: int, dtype: DType) -> None:
        self.own = segment.own(length)
        count, nbytes = self.own.stop - self.own.start, length * dtype.itemsize
        self.totals = [row.view(total_dtype(dtype))[:count] for row in segment.totals]
        self.sent_totals = [total.view(np.uint8) for total in self.totals]
        self.results: list[Array] = [row[:nbytes].view(dtype) for row in segment.results]
        self.sent_results = [result[self.own].view(np.uint8) for result in self.results]


class _Call:
    """This rank's messages of one call, and the folds between them; numbers are those of chunks."""

    def __init__(self, segment: ChainSegment, tasks: list[ChunkTask], op: str) -> None:
        self.tasks, self._op = tasks, op
        self._chain = segment.chain
        self._is_last = segment.chain.node == segment.chain.nodes - 1
        # That of each chunk: most of them are equally long.
        shapes = [(len(task.rows[0]), task.dtype) for task in tasks]
        made = {shape: _Memory(segment, *shape) for shape in dict.fromkeys(shapes)}
        self._memory = [made[shape] for shape in shapes]
        # What comes next, and what has been sent: by the memory that it is sent from.
        self._total: Handle | None = None
        self._result: Handle | None = None
        self._sent: dict[int, Handle] = {}
        self._ask_total(0)

    def fold(self, number: int) -> Steps:
        """Fold this rank's part onto the total of earlier nodes; send the total or the result."""
        task, memory, total = self.tasks[number], self._memory[number], None
        going = 2 + (number & 1)
        yield from self._sent_from(-going)
        if self._total is not None:
            yield self._total
            self._ask_total(number + 1)
            total = memory.totals[number & 1]
        if self._is_last:
            self._fold(task, memory.own, total, memory.results[number % _RESULTS][memory.own])
            self._send_result(memory, number)
            return
        self._fold(task, memory.own, total, memory.totals[going])
        self._sent[-going] = self._chain.send(memory.sent_totals[going], self._chain.after)

    def _fold(self, task: ChunkTask, own: slice, total: Array | None, out: Array) -> None:
        for part, elements in [(own, None)] if task.pieces is None else task.pieces:
            start, stop = max(part.start, own.start), min(part.stop, own.stop)
            if start >= stop:
                continue
            rows: Any = task.rows
            rows = (
                rows[:, start:stop]
                if isinstance(rows, np.ndarray)
                else [r[start:stop] for r in rows]
            )
            if elements is not None:
                rows[self._chain.control.rank] = elements[start - part.start : stop - part.start]
            into = slice(start - own.start, stop - own.start)
            before = None if total is None else total[into]
            self._chain.fold_on(self._op, task.dtype, before, rows, out[into])

    def take_result(self, number: int) -> Steps:
        """Wait for this rank's part of a result, send it on, and ask for the next one."""
        if self._is_last:
            return
        if 0 <= number < len(self.tasks):
            assert self._result is not None
            yield self._result
            self._send_result(self._memory[number], number)
        if -1 <= number < len(self.tasks) - 1:
            into = self._memory[number + 1].sent_results[(number + 1) % _RESULTS]
            self._result = self._chain.recv(into, self._chain.after)

    def sent_result(self, number: int) -> Iterable[Handle]:
        """Return what is on its way from memory that a result is to have."""
        return self._sent_from(number % _RESULTS)

    def results_of(self, number: int) -> Array:
        """Return the result of a chunk."""
        results = self._memory[number].results
        return results[number % _RESULTS]

    def finish(self) -> Steps:
        """Wait until everything has been sent."""
        yield from self._sent.values()

    def _sent_from(self, place: int) -> Iterable[Handle]:
        return [self._sent.pop(place)] if place in self._sent else []

    def _ask_total(self, number: int) -> None:
        self._total = None
        if self._chain.before >= 0 and number < len(self.tasks):
            into = self._memory[number].sent_totals[number & 1]
            self._total = self._chain.recv(into, self._chain.before)

    def _send_result(self, memory: _Memory, number: int) -> None:
        if self._chain.before >= 0:
            place = number % _RESULTS
            self._sent[place] = self._chain.send(memory.sent_results[place], self._chain.before)


def chunk_tasks(segment: ChainSegment, source: Flat, target: Flat) -> Iterator[ChunkTask]:
    """Cut an array into chunks, whose folds go to `target`; the two may be the same memory."""
    control, step = segment.control, segment.chunk_for(source.nbytes) // source.itemsize
    for number, start in enumerate(range(0, len(source), step)):
        part, into = source[start : start + step], target[start : start + step]
        rows = segment.rows[number % ROWS, :, : part.nbytes].view(part.dtype)
        row, targets = rows[control.rank], partial(_whole, into)
        if control.size > _MANY:
            yield ChunkTask(partial(np.copyto, row, part), part.dtype, rows, targets)
            continue
        fill = partial(_copy_others, row, part, segment.own(len(part)))
        rows = list(rows)
        rows[control.rank] = part
        yield ChunkTask(fill, part.dtype, rows, targets)


def _copy_others(row: Flat, part: Flat, own: slice) -> None:
    """Copy what others fold."""
    for others in (slice(own.start), slice(own.stop, None)):
        row[others] = part[others]


def _whole(into: Flat) -> Targets:
    return [(slice(None), into)]


def segment_of(transport: Link) -> Steps:
    """Return the segment of a transport's chain, opened by the first call; collective.

    None, on every rank, if the ranks of a node cannot open it.
    """
    assert isinstance(transport, Transport)
    if ChainSegment not in transport.kept:
        transport.kept[ChainSegment] = yield from _open(transport)
    return transport.kept[ChainSegment]


def opened(transport: Transport) -> bool:
    """Return whether the segment of a transport has been opened."""
    return transport.kept.get(ChainSegment) is not None


def _open(transport: Transport) -> Steps:
    chain = transport.chain
    if chain is None:
        return None
    memory, _ = yield from share(transport, ChainSegment.nbytes_of(chain), chain.control)
    segment = None
    if memory is not None:
        with suppress(MemoryError):
            segment = ChainSegment(chain, memory)
    opening = MemoryOpened(segment is not None, compiled is not None)
    replies = yield from exchange_details(transport.control, opening)
    return segment if all(reply.opened for reply in replies) else None
