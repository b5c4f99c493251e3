"""The shared segment: memory of a node's ranks, in which large arrays are reduced by chunks.

A chunk is small enough to stay in the caches from the copy in to the fold, so that only the ranks'
own arrays go through main memory. Each rank folds a part of a chunk for all, and copies in what
others fold. The steps are those of the control channel. A rank publishes a chunk and then folds its
part of the one before, so that it seldom waits for ranks that are slightly slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import DType
from arraycomm._folds import fold
from arraycomm._folds.in_c import number_of
from arraycomm._native import compiled
from arraycomm._protocol.details import Detail, exchange_details
from arraycomm._reduce.blocks import raw
from arraycomm._transports.base import Bytes, Flat, Link, Steps, Transport
from arraycomm._transports.control import ControlChannel, SharedControl

_CHUNK_BYTES: Final = 512 << 10
# With more ranks than these, which wait for more, a chunk is up to this many times as long, if the
# segment has at most this many bytes then.
_FEW_RANKS: Final = 3
_LONG_CHUNK: Final = 4
_SEGMENT_BYTES: Final = 48 << 20
# All ranks' arrays of this many bytes fit in the caches: what is quicker for these need not be for
# larger ones.
CACHED_BYTES: Final = 8 << 20
# This many chunks are copied past the caches and as many through them, to see which is quicker.
# This many others come before the next trial.
_TRIED: Final = 3
_BETWEEN_TRIALS: Final = 1024
# For so long the native part makes turns before Python looks around.
NANOSECONDS: Final = 20_000_000
# A segment was measured with up to this many ranks.
_MEASURED_RANKS: Final = 8
# Chunks that are under way at once. A rank that fills the row of chunk k has seen every rank
# publish chunk k - 2. These ranks have folded chunk k - 3, and with it chunk k - 4, whose row chunk
# k reuses.
ROWS: Final = 4
# Folded chunks: while ranks take one, some have folded the next, and some go on to the one after
# that.
FOLDED: Final = 3


# Where elements of a chunk go: which of them, and the memory for their results.
Targets = Iterable[tuple[slice, Array]]


# What the native part is told of the segment, and from where it goes on; see _native/segment.h.
Place: TypeAlias = tuple[Any, ...]


class ChunkTask(NamedTuple):
    """One chunk of a call: `fill` writes this rank's row; `targets` returns where results go.

    Along a chain of nodes this rank's part is folded in `pieces`: which elements each of them has,
    and those of this rank, or None if they are in its row. What `rows` or `pieces` have elsewhere,
    `fill` may leave out.
    """

    fill: Callable[[], None]
    dtype: DType
    rows: Sequence[Array] | Array
    targets: Callable[[], Targets]
    pieces: Sequence[tuple[slice, Array | None]] | None = None


def own_part(count: int, rank: int, size: int) -> slice:
    """Return which of this many elements of a chunk a rank folds for all."""
    return slice(count * rank // size, count * (rank + 1) // size)


def chunk_bytes(size: int) -> int:
    """Return the bytes of a chunk in the segment of `size` ranks, a multiple of 64."""
    if size <= _FEW_RANKS:
        return _CHUNK_BYTES
    fit = _SEGMENT_BYTES // ((ROWS * size + FOLDED) * _CHUNK_BYTES)
    return _CHUNK_BYTES * max(min(_LONG_CHUNK, fit), 1)


# Whether a chunk is copied in past the caches; and a list for the seconds that a byte takes to be
# copied and to be folded, if they are to be measured.
_Way: TypeAlias = tuple[bool, list[float] | None]


class _Copies:
    """Whether the chunks of calls of about one size are copied in past the caches.

    Through the caches is quicker if the cores of the ranks have one in common, and takes several
    times as long if they have none. The cores of a virtual machine change, so both ways are tried
    again and again. What counts is also how long the others' rows take to be read, so all ranks try
    the same way with the same chunks.
    """

    def __init__(self) -> None:
        self._streams = True
        # The first chunk of each row waits for the system to provide its memory.
        self._number = -ROWS
        self._tried: dict[bool, list[list[float]]] = {}

    def ways(self) -> Iterator[_Way]:
        """Yield the way of each chunk of a call."""
        while True:
            yield self._next()

    def _next(self) -> _Way:
        number = self._number
        self._number = number + 1 if number < 2 * _TRIED + _BETWEEN_TRIALS else 0
        if number == 0:
            self._tried = {True: [], False: []}
        if 0 <= number < 2 * _TRIED:
            streams, seconds = number < _TRIED, list[float]()
            self._tried[streams].append(seconds)
            return streams, seconds
        # What is measured of a chunk is known later, at the latest once its call is over.
        tried, measured = self._tried, [seconds for way in self._tried.values() for seconds in way]
        if number >= 2 * _TRIED and tried and all(len(seconds) == 2 for seconds in measured):
            past, through = (min(map(sum, way)) for way in tried.values())
            self._streams, self._tried = past <= through, {}
        return self._streams, None


class SharedSegment:
    """Rows of memory for the chunks of each rank that are under way, and some for folded chunks."""

    # Whether chunks go on along a chain of nodes: then no turns are made in the native part.
    chained: ClassVar[bool] = False

    def __init__(self, control: SharedControl, memory: Bytes, *, native: bool) -> None:
        # Its steps say which chunks every rank has published.
        self.control = control
        # Whether all ranks can copy past their caches.
        self.native = native
        self._small, self._large = _Copies(), _Copies()
        # The largest size of a chunk.
        self.chunk_bytes = chunk_bytes(control.size)
        self._memory = memory
        rows = memory.reshape(-1, self.chunk_bytes)
        # Chunk k of a call uses the rows k modulo ROWS. At the call's end all ranks have folded all
        # chunks, so the rows are free, also for a call without a header.
        self.rows = rows[: ROWS * control.size].reshape(ROWS, control.size, self.chunk_bytes)
        self._folded = rows[ROWS * control.size :]

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of memory that a group of `size` ranks shares."""
        return (ROWS * size + FOLDED) * chunk_bytes(size)

    def chunk_for(self, nbytes: int) -> int:
        """Return the bytes of a chunk of a call with this many bytes in all."""
        return self.chunk_bytes

    def own(self, count: int) -> slice:
        """Return which of this many elements of a chunk this rank folds for all."""
        return own_part(count, self.control.rank, self.control.size)

    def ways(self, nbytes: int) -> Iterator[_Way]:
        """Return the way of each chunk of a call with this many bytes in all."""
        if not self.native:
            return repeat((False, None))
        return (self._large if nbytes > CACHED_BYTES else self._small).ways()

    def reduce(self, chunk_tasks: Iterable[ChunkTask], op: str) -> Steps:
        """Reduce chunk after chunk; each task fills this rank's row and names the targets.

        This is the way of a rank without the native part. A step publishes a chunk, and this rank's
        part of the one before. What all ranks have folded is taken once they have posted the next
        step.
        """
        published: ChunkTask | None = None
        done: ChunkTask | None = None
        for number, chunk in enumerate(chain(chunk_tasks, (None, None))):
            if chunk is not None:
                chunk.fill()
            if number:
                yield self.control
            if published is not None:
                own, folded = self.own(len(published.rows[0])), self._folded_of(published, number)
                fold(op, published.dtype, [row[own] for row in published.rows], folded[own])
            if chunk is not None or published is not None:
                self.control.post()
            if done is not None:
                folded = self._folded_of(done, number - 1)
                for part, target in done.targets():
                    target[...] = folded[part]
            published, done = chunk, published

    def reduce_array(self, source: Flat, target: Flat, op: str) -> Steps:
        """Reduce an array in the native part; `target` may be the same memory."""
        x, number = raw(source), number_of(op, source.dtype)
        count = -(-source.nbytes // self.chunk_bytes)

        def go_on(place: Place) -> tuple[int, int]:
            reached: tuple[int, int] = compiled.reduce_chunks(place, x, number)
            return reached

        yield from self.reduce_natively(go_on, raw(target), count)

    def reduce_natively(
        self, go_on: Callable[[Place], tuple[int, int]], target: Bytes, count: int
    ) -> Steps:
        """Reduce `count` chunks in the native part by `go_on`."""
        control, nbytes = self.control, target.nbytes
        if not count:
            return
        ways = list(islice(self.ways(nbytes), count))
        streams, seconds = bytes(past for past, _ in ways), np.empty((count, 2))
        memory = control.slots, self._memory, target, streams, seconds
        sizes = control.slot, control.rank, control.size, self.chunk_bytes
        large = nbytes > CACHED_BYTES
        turn = 0
        while turn < count + 2:
            if turn:
                yield control
            turn, control.step = go_on(
                (*memory, *sizes, large, ROWS, FOLDED, turn, control.step, NANOSECONDS)
            )
        for (_, measured), found in zip(ways, seconds.tolist(), strict=True):
            if measured is not None:
                measured.extend(found)

    def _folded_of(self, chunk_task: ChunkTask, number: int) -> Flat:
        folded: Flat = self._folded[number % FOLDED]
        return folded[: chunk_task.rows[0].nbytes].view(chunk_task.dtype)


@dataclass(frozen=True, slots=True)
class MemoryOffer(Detail):
    """The name of memory that rank 0 offers; empty if there is none."""

    memory: str


@dataclass(frozen=True, slots=True)
class MemoryOpened(Detail):
    """Whether a rank could open the memory, and whether it has the native part."""

    opened: bool
    native: bool


def is_preferred(link: Link, nbytes: int) -> bool:
    """Return whether a segment suits `nbytes` bytes better, if all ranks have the native part.

    See `SharedSegment.native` and `is_quicker`.
    """
    _, shared = link.slot
    return shared and is_quicker(nbytes, link.size)


def is_quicker(nbytes: int, size: int) -> bool:
    """Return whether a segment is quicker than the transport, as measured with up to 8 ranks."""
    return nbytes <= _CHUNK_BYTES or size <= _MEASURED_RANKS


def streaming_segment_of(link: Link) -> Steps:
    """Return a link's segment if all ranks can copy past their caches, else None; collective."""
    segment = yield from segment_of(link)
    return segment if segment is not None and segment.native else None


def segment_of(link: Link) -> Steps:
    """Return the shared segment of a link, opened by the first call; collective.

    None, on every rank, if the ranks do not share memory or one of them cannot open it.
    """
    if SharedSegment not in link.kept:
        found = (yield from _open(link)) if isinstance(link, Transport) else None
        link.kept[SharedSegment] = found
    return link.kept[SharedSegment]


def opened(transport: Transport) -> SharedSegment | None:
    """Return the segment of a transport if it has been opened."""
    return transport.kept.get(SharedSegment)


def _open(transport: Transport) -> Steps:
    memory, native = yield from share(transport, SharedSegment.nbytes(transport.size))
    control = transport.control
    if memory is None or not isinstance(control, SharedControl):
        return None
    return SharedSegment(control, memory, native=native)


def share(transport: Transport, nbytes: int, among: ControlChannel | None = None) -> Steps:
    """Return bytes that all ranks share, and whether all have the native part; collective.

    Of a control channel `among` some ranks, these share it. The memory is None, on every rank, if
    one of them cannot open it.
    """
    control = among or transport.control
    if not isinstance(control, SharedControl):
        return None, False
    name = transport.offer_memory(nbytes) if control.rank == 0 else ""
    try:
        offers = yield from exchange_details(control, MemoryOffer(name))
        memory = transport.open_memory(offers[0].memory, nbytes)
        replies = yield from exchange_details(
            control, MemoryOpened(memory is not None, compiled is not None)
        )
    finally:
        if name:
            transport.close_memory(name)
    if memory is None or not all(reply.opened for reply in replies):
        return None, False
    return memory, all(reply.native for reply in replies)
