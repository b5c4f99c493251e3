"""The window: memory that the ranks of a node share, through which trees are reduced chunk by chunk.

A chunk is small enough to stay in the caches from the copy in to the fold, so that the ranks' own
arrays are all that memory sees. The steps are those of the control channel. A rank shows a chunk before it
folds the one before, so that it seldom waits for ranks that are a little behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from arraycomm._dtypes import DType
from arraycomm._folds import fold
from arraycomm._protocol.header import Steps, exchange_details
from arraycomm._transports.base import Bytes
from arraycomm._transports.control import SharedControl, fence

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator

Array = np.ndarray[Any, Any]

# Up to so many ranks everyone folds everything, which saves a step and a copy; beyond, the fold of
# all rows takes longer than these.
_EVERYONE: Final = 3
_CHUNK_BYTES: Final = 512 << 10


# Chunks that are on their way at once. A rank that shows chunk k has folded all up to k - 2, and shows
# it when everyone has shown k - 2: so everyone has folded k - 4, in whose row it is.
ROWS: Final = 4


class ChunkTask(NamedTuple):
    """One chunk of a call: what fills this rank's row, all ranks' rows, and where the result goes."""

    fill: Callable[[], None]
    dtype: DType
    rows: Sequence[Array]
    target: Callable[[], Array]


class Reached:
    """Everyone's having come to a step, which this rank may have passed."""

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
    """Rows of memory for each rank's chunks on their way, and one for chunks that are folded.

    Attributes
    ----------
    control channel : SharedBoard
        Its steps say whose chunk is where.
    chunk_bytes : int
        How long a chunk may be.
    rows : ndarray
        Bytes, shape (ROWS, size, chunk_bytes): chunk k goes by rows k modulo ROWS.
    """

    def __init__(self, control: SharedControl, memory: Bytes) -> None:
        self.control = control
        self.chunk_bytes = _CHUNK_BYTES
        rows = memory.reshape(-1, _CHUNK_BYTES)
        self.rows = rows[: ROWS * control.size].reshape(ROWS, control.size, _CHUNK_BYTES)
        self._folded = rows[ROWS * control.size]
        self._reached = Reached(control)

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of memory that a group of `size` ranks shares."""
        return (ROWS * size + 1) * _CHUNK_BYTES

    def reduce(self, chunk_tasks: Iterable[ChunkTask], op: str) -> Steps:
        """Reduce chunk after chunk; a passage fills this rank's row, and says where results go."""
        if self.control.size > _EVERYONE:
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
        """Fold a part of the chunk for all ranks, and take theirs."""
        control, target = self.control, chunk_task.target()
        chunk_task.fill()
        control.post()
        yield control
        count, folded = len(target), self._folded[: target.nbytes].view(chunk_task.dtype)
        mine = slice(
            count * control.rank // control.size, count * (control.rank + 1) // control.size
        )
        fold(op, chunk_task.dtype, [row[mine] for row in chunk_task.rows], folded[mine])
        control.post()
        yield control
        target[...] = folded


def segment_of(comm: Communicator) -> Steps:
    """Return the communicator's window, opened when it is first asked for; collective.

    None, on every rank, where the ranks do not share memory or one of them cannot open it.
    """
    if comm._segment is None:
        comm._segment = (yield from _open(comm)) or False
    return comm._segment or None


def _open(comm: Communicator) -> Steps:
    control, link = comm._control, comm._link
    if not isinstance(control, SharedControl):
        return None
    nbytes = SharedSegment.nbytes(comm.size)
    name = link.offer_memory(nbytes) if comm.rank == 0 else ""
    try:
        said = yield from exchange_details(control, {"memory": name})
        memory = link.open_memory(said[0]["memory"], nbytes)
        opened = yield from exchange_details(control, {"opened": memory is not None})
    finally:
        if name:
            link.close_memory(name)
    if memory is None or not all(detail["opened"] for detail in opened):
        return None
    return SharedSegment(control, memory)
