"""Reductions of two ranks, each alone on its node: they send one another everything, and each folds all of it.

As many bytes go each way as by slices, but no result has to come back. An array goes in chunks of the length of
a message. A chunk is folded when the other rank's has come, while both are in the caches, so that only the arrays go
through main memory. The memory is that of a segment, which each rank has for itself: the other one's rows come as messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary

import numpy as np

from arraycomm._arrays.memory import allocate
from arraycomm._collectives.segment import (
    CACHED_BYTES,
    NANOSECONDS,
    ROWS,
    ChunkTask,
    Place,
    SharedSegment,
)
from arraycomm._native import compiled
from arraycomm._transports.base import Bytes, Link, Steps, Transport
from arraycomm._transports.pairs import ExchangePairs

_LINE: Final = 64


def chunk_bytes(nbytes: int, most: int) -> int:
    """Return the bytes of a chunk of so many bytes in all; they are equally long, but for the last one."""
    count = max(-(-nbytes // most), 1)
    return max(-(-nbytes // (count * _LINE)), 1) * _LINE


class ExchangeSegment(SharedSegment):
    """Rows of memory for the chunks of both ranks that are under way, and one for a folded chunk."""

    folds_all = True

    # MPI may still write to the memory of a reduction that was given up.
    under_way: ClassVar[set[ExchangeSegment]] = set()

    def __init__(self, control: Any, exchange_pairs: ExchangePairs) -> None:
        self.control, self.exchange_pairs = control, exchange_pairs
        self.native, self.position = compiled is not None, 0
        self.turns_natively = self.arrays_natively = self.control.native is not None
        self.chunk_bytes = chunk = exchange_pairs.nbytes
        self._memory = allocate(((2 * ROWS + 1) * chunk,), np.dtype(np.uint8))
        rows = self._memory.reshape(-1, chunk)
        self.rows, self._folded = rows[:-1].reshape(ROWS, 2, chunk), rows[-1:]

    def chunk_for(self, nbytes: int) -> int:
        return chunk_bytes(nbytes, self.chunk_bytes)

    def own(self, count: int) -> slice:
        return slice(0, count)

    def reduce(
        self, chunk_tasks: Iterable[ChunkTask], op: str, nbytes: int, *, one_way: bool = False
    ) -> Steps:
        tasks, self.position = list(chunk_tasks), 0
        pairs = self.exchange_pairs.of(self.rows, self.control.rank, self.chunk_for(nbytes))
        copy = compiled.copy if self.native and nbytes > CACHED_BYTES else np.copyto
        self.under_way.add(self)
        begun = 0
        for number, task in enumerate(tasks):
            while begun < min(number + ROWS, len(tasks)):
                pair = pairs[begun % ROWS]
                if begun >= ROWS:
                    yield pair.sent
                tasks[begun].fill(False)
                pair.begin()
                begun += 1
            yield pairs[number % ROWS].received
            self.fold_part(task, 0, op)
            folded = self._folded_of(task, 0)
            for part, target in task.targets():
                copy(target, folded[part])
        for pair in pairs[:begun]:
            yield pair.sent
        self.under_way.discard(self)

    def reduce_natively(
        self, go_on: Callable[[Place], tuple[int, int]], target: Bytes, count: int, first: int
    ) -> Steps:
        control, nbytes, self.position = self.control, target.nbytes, 0
        length = self.chunk_for(nbytes)
        pairs = self.exchange_pairs.of(self.rows, self.control.rank, length)
        memory = control.slots, self._memory, target, bytes(count), np.empty((count, 2))
        sizes = control.slot, control.rank, control.size, self.chunk_bytes, length
        rows = nbytes > CACHED_BYTES, ROWS, 1, 0
        messages = control.native, [address for pair in pairs for address in pair.addresses]
        self.under_way.add(self)
        folded = begun = 0
        while folded < count:
            if begun:
                # What the native part needs next.
                pair = pairs[folded % ROWS]
                yield pair.sent if folded == begun else pair.received
            folded, begun = go_on((*memory, *sizes, *rows, folded, begun, NANOSECONDS, *messages))
            if begun < 0:
                raise self.exchange_pairs.failure(-begun)
        for pair in pairs:
            yield pair.sent
        self.under_way.discard(self)


_opened: Final[WeakKeyDictionary[Transport, ExchangeSegment]] = WeakKeyDictionary()


def segment_of(transport: Link) -> Steps:
    """Return the memory through which the two ranks of a transport exchange chunks; local."""
    yield from ()
    assert isinstance(transport, Transport)
    if transport not in _opened:
        assert transport.exchange_pairs is not None
        _opened[transport] = ExchangeSegment(transport.control, transport.exchange_pairs)
    return _opened[transport]


def install(transport: Transport, opened: ExchangeSegment) -> None:
    """Have a transport use this memory; every rank calls this."""
    _opened[transport] = opened
