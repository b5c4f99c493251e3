"""The shared segment: memory that the ranks of a node share, in which trees are reduced by chunks.

A chunk is small enough to stay in the caches from the copy in to the fold, so that only the ranks'
own arrays go through main memory. The steps are those of the control channel. A rank publishes a
chunk and then folds the one before, so that it seldom waits for ranks that are slightly slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import DType
from arraycomm._folds import fold
from arraycomm._protocol.details import Detail, exchange_details
from arraycomm._protocol.group import Group
from arraycomm._transports.base import Bytes, Steps
from arraycomm._transports.control import SharedControl
from arraycomm._transports.memory_order import fence
from arraycomm._trees.layout import Chunk, Spec

# Up to this many ranks, each rank folds whole chunks, which saves a step and a copy. With more
# ranks, folding all rows takes longer than the step and the copy.
_MAX_WHOLE_FOLDS: Final = 3
_CHUNK_BYTES: Final = 512 << 10


# Chunks that are under way at once. A rank that publishes chunk k has folded chunk k - 2, and so
# every rank has published chunk k - 2. These ranks have folded chunk k - 4, whose row chunk k
# reuses.
ROWS: Final = 4


class ChunkTask(NamedTuple):
    """One chunk of a call: `fill` writes this rank's row; `target` returns the result's memory."""

    fill: Callable[[], None]
    dtype: DType
    rows: Sequence[Array]
    target: Callable[[], Array]


class ChunkLayout:
    """Where the leaves of one chunk lie in the shared segment; the same in every call.

    Attributes
    ----------
    span : slice
        Where the chunk lies among all buckets.
    rows : list of ndarray
        Every rank's row as elements of the chunk.
    leaves : list of (int, ndarray)
        The leaves that lie in the chunk as a whole, and their parts of this rank's row.
    ends : list of (int, slice, ndarray)
        The same for leaves that are cut: which of their bytes lie where.
    """

    def __init__(
        self, chunk: Chunk, segment: SharedSegment, number: int, specs: tuple[Spec, ...]
    ) -> None:
        self.dtype, self.span = chunk.dtype, slice(chunk.start, chunk.stop)
        rows = segment.rows[number, :, : chunk.stop - chunk.start]
        self.rows = list(rows.view(chunk.dtype))
        self.leaves: list[tuple[int, Array]] = []
        self.ends: list[tuple[int, slice, Bytes]] = []
        own_row = rows[segment.control.rank]
        for leaf, first, last, at in chunk.parts:
            dtype, shape = specs[leaf]
            part = own_row[at : at + last - first]
            if last - first == math.prod(shape) * dtype.itemsize:
                self.leaves.append((leaf, part.view(dtype).reshape(shape)))
            else:
                self.ends.append((leaf, slice(first, last), part))

    def chunk_task(
        self, arrays: Sequence[Array | None], flats: Mapping[int, Bytes | None], buffer: Bytes
    ) -> ChunkTask:
        """Return the chunk of one call, with these leaves."""
        return ChunkTask(
            lambda: self.fill(arrays, flats),
            self.dtype,
            self.rows,
            lambda: buffer[self.span].view(self.dtype),
        )

    def fill(self, arrays: Sequence[Array | None], flats: Mapping[int, Bytes | None]) -> None:
        """Copy the leaves' parts into this rank's row; None stands for zeros."""
        for leaf, into in self.leaves:
            array = arrays[leaf]
            into[...] = 0 if array is None else array
        for leaf, part, into in self.ends:
            flat = flats[leaf]
            into[...] = 0 if flat is None else flat[part]


class _StepReached:
    """A handle that is done when every rank has posted a step, if not a later one."""

    def __init__(self, control: SharedControl) -> None:
        self.control = control
        self.step = 0

    def done(self) -> bool:
        """Tell whether every rank has posted the step, or the next but one in the same place."""
        step, control = self.step, self.control
        words = control.words[step & 1]
        for stamp in control.stamps:
            if words[stamp] < step:
                return False
        fence()
        return True


class SharedSegment:
    """Rows of memory for the chunks of each rank that are under way, and one for folded chunks.

    Attributes
    ----------
    control : SharedControl
        Its steps say which chunks every rank has published.
    chunk_bytes : int
        The largest size of a chunk.
    rows : ndarray
        Bytes, shape (ROWS, size, chunk_bytes); chunk k uses the rows k modulo ROWS.
    """

    def __init__(self, control: SharedControl, memory: Bytes) -> None:
        self.control = control
        self.chunk_bytes = _CHUNK_BYTES
        rows = memory.reshape(-1, _CHUNK_BYTES)
        self.rows = rows[: ROWS * control.size].reshape(ROWS, control.size, _CHUNK_BYTES)
        self._folded = rows[ROWS * control.size]
        self._reached = _StepReached(control)

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of memory that a group of `size` ranks shares."""
        return (ROWS * size + 1) * _CHUNK_BYTES

    def reduce(self, chunk_tasks: Iterable[ChunkTask], op: str) -> Steps:
        """Reduce chunk after chunk; each task fills this rank's row and names the target."""
        if self.control.size > _MAX_WHOLE_FOLDS:
            for chunk_task in chunk_tasks:
                yield from self._reduce_together(chunk_task, op)
            return
        control, reached, last = self.control, self._reached, None
        for chunk_task in chunk_tasks:
            chunk_task.fill()
            control.post()
            if last is not None:
                reached.step = control.step - 1
                yield reached
                fold(op, last.dtype, last.rows, last.target())
            last = chunk_task
        if last is not None:
            yield control
            fold(op, last.dtype, last.rows, last.target())

    def _reduce_together(self, chunk_task: ChunkTask, op: str) -> Steps:
        """Fold a part of the chunk for all ranks, and take the parts that they fold."""
        control, target = self.control, chunk_task.target()
        chunk_task.fill()
        control.post()
        yield control
        count, folded = len(target), self._folded[: target.nbytes].view(chunk_task.dtype)
        own = slice(
            count * control.rank // control.size, count * (control.rank + 1) // control.size
        )
        fold(op, chunk_task.dtype, [row[own] for row in chunk_task.rows], folded[own])
        control.post()
        yield control
        target[...] = folded


@dataclass(frozen=True, slots=True)
class MemoryOffer(Detail):
    """The name of memory that rank 0 offers; empty if there is none."""

    memory: str


@dataclass(frozen=True, slots=True)
class MemoryOpened(Detail):
    """Whether a rank could open the memory."""

    opened: bool


def open_segment(group: Group) -> Steps:
    """Open a shared segment; collective.

    None, on every rank, if the ranks do not share memory or one of them cannot open it.
    """
    control, transport = group.control, group.transport
    if not isinstance(control, SharedControl):
        return None
    nbytes = SharedSegment.nbytes(group.size)
    name = transport.offer_memory(nbytes) if group.rank == 0 else ""
    try:
        offers = yield from exchange_details(control, MemoryOffer(name))
        memory = transport.open_memory(offers[0].memory, nbytes)
        replies = yield from exchange_details(control, MemoryOpened(memory is not None))
    finally:
        if name:
            transport.close_memory(name)
    if memory is None or not all(reply.opened for reply in replies):
        return None
    return SharedSegment(control, memory)
