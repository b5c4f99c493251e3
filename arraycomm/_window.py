"""The window: memory that the ranks of a node share, through which trees are reduced chunk by chunk.

A chunk is small enough to stay in the caches from the copy in to the fold, so that the ranks' own
arrays are all that memory sees. The steps are those of the board, with its promise: who sees
everyone's step k + 1 knows that everyone has finished reading step k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from arraycomm._folds import fold
from arraycomm._header import Steps, exchange_details
from arraycomm._transports.base import Bytes
from arraycomm._transports.board import Board

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator

Array = np.ndarray[Any, Any]

# Up to so many ranks everyone folds everything, which saves a step and a copy; beyond, the fold of
# all rows takes longer than these.
_EVERYONE: Final = 3
_CHUNK_BYTES: Final = 256 << 10


class Window:
    """Two rows of memory a rank, for chunks on their way, and one for chunks that are folded.

    Attributes
    ----------
    board : Board
        Its steps say whose chunk is where.
    chunk_bytes : int
        How long a chunk may be.
    rows : ndarray
        For each parity of a step, one row of bytes a rank.
    """

    def __init__(self, board: Board, memory: Bytes) -> None:
        self.board = board
        self.chunk_bytes = _CHUNK_BYTES
        rows = memory.reshape(-1, _CHUNK_BYTES)
        self.rows = rows[: 2 * board.size].reshape(2, board.size, _CHUNK_BYTES)
        self._folded = rows[2 * board.size]

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of memory that a group of `size` ranks shares."""
        return (2 * size + 1) * _CHUNK_BYTES

    def show(self) -> Steps:
        """Show the others the chunk that is in this rank's row, and wait for theirs."""
        self.board.post()
        yield self.board

    def fold(self, parts: Sequence[Array], target: Array, op: str) -> Steps:
        """Fold the chunks that all ranks have shown into `target`."""
        board, dtype = self.board, target.dtype
        if board.size <= _EVERYONE:
            fold(op, dtype, parts, target)
            return
        count, folded = len(target), self._folded[: target.nbytes].view(dtype)
        mine = slice(count * board.rank // board.size, count * (board.rank + 1) // board.size)
        fold(op, dtype, [part[mine] for part in parts], folded[mine])
        yield from self.show()
        target[...] = folded


def window_of(comm: Communicator) -> Steps:
    """Return the communicator's window, opened when it is first asked for; collective.

    None, on every rank, where the ranks do not share memory or one of them cannot open it.
    """
    if comm._window is None:
        comm._window = (yield from _open(comm)) or False
    return comm._window or None


def _open(comm: Communicator) -> Steps:
    board, link = comm._board, comm._link
    if not board.shared:
        return None
    nbytes = Window.nbytes(comm.size)
    name = link.offer_memory(nbytes) if comm.rank == 0 else ""
    try:
        said = yield from exchange_details(board, {"memory": name})
        memory = link.open_memory(said[0]["memory"], nbytes)
        opened = yield from exchange_details(board, {"opened": memory is not None})
    finally:
        if name:
            link.close_memory(name)
    if memory is None or not all(detail["opened"] for detail in opened):
        return None
    return Window(board, memory)
