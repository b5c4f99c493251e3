"""Notes: what each rank tells the others beside its steps, and its form in shared memory.

In shared memory a rank's notes begin with four words: how it left, the last step that it completed,
the length of its exit text, and the number and length of its wait status. Then come the exit text
and two places for wait statuses, used in turn, so that a reader always finds a complete one.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

_TEXT: Final = 32
_EXIT_TEXT: Final = 4096
_STATUS: Final = _TEXT + _EXIT_TEXT
_STATUS_TEXT: Final = 512
NOTES_BYTES: Final = _STATUS + 2 * _STATUS_TEXT

# How a rank left a group; 0 if it has not. FAILED: it will make no further call here. GONE: its
# error has been printed, and its process ends. Without an error: what it ran came to its end
# (FINISHED), its process ends (ENDED), or its program has finalized MPI (FINALIZED). GAVE_UP: it
# has waited too long, and makes no further call here either.
FAILED, FINISHED, GONE, ENDED, FINALIZED, GAVE_UP = range(1, 7)
WELL: Final = (FINISHED, ENDED, FINALIZED)


_STRONGLY_ORDERED: Final = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def fence() -> None:
    """Order what comes before and after in memory, on processors that would reorder it."""
    # What comes before and after may move into the use of a lock, but not past the end of one and
    # the beginning of another. Nobody else waits for it: an interrupt may leave it taken.
    for lock in () if _STRONGLY_ORDERED else [threading.Lock()] * 2:
        with lock:
            pass


class ExitNotice(NamedTuple):
    """How a rank left: the state, the step of its last completed call, its traceback."""

    state: int
    step: int
    text: str


class Notes:
    """What a group's ranks tell one another beside their steps; this class itself tells nothing."""

    def announce_exit(self, state: int, completed: int, text: str) -> None:
        """Tell the other ranks that this one joins no call after that of step `completed`.

        If it is called again, only the state changes; FAILED and GAVE_UP, which come from a thread
        that may be late, change nothing then.
        """

    def exit_notices(self) -> dict[int, ExitNotice]:
        """Return the exit notices of the other ranks that have left."""
        return {}

    def report_wait(self, status: str) -> None:
        """Tell the other ranks which call this one is waiting in; empty if it no longer waits."""

    def wait_status(self, rank: int) -> str:
        """Return which call `rank` is waiting in, or an empty string if it has not reported any."""
        return ""

    def ask_wait_status(self, ranks: Sequence[int]) -> None:
        """Ask these ranks for their wait status, if they have to be asked."""

    def answer_requests(self) -> None:
        """Answer the requests of other ranks; called while this rank waits for something else."""


class SharedNotes(Notes):
    """The notes of all ranks, in memory of shape (size, NOTES_BYTES); `rank` writes its own."""

    def __init__(self, rank: int, memory: np.ndarray[Any, Any]) -> None:
        self._rank, self._memory = rank, memory
        self._words = [note[:_TEXT].data.cast("q") for note in memory]

    def announce_exit(self, state: int, completed: int, text: str) -> None:
        words = self._words[self._rank]
        if words[0] and state in (FAILED, GAVE_UP):
            return
        if not words[0]:
            data = text.encode(errors="replace")[-_EXIT_TEXT:]
            self._write(_TEXT, data)
            words[1], words[2] = completed, len(data)
            fence()
        words[0] = state

    def exit_notices(self) -> dict[int, ExitNotice]:
        left = [r for r, words in enumerate(self._words) if words[0] and r != self._rank]
        fence()
        return {rank: self._exit_notice(rank) for rank in left}

    def _exit_notice(self, rank: int) -> ExitNotice:
        state, completed, length, _ = self._words[rank]
        text = self._read(rank, _TEXT, min(max(length, 0), _EXIT_TEXT))
        return ExitNotice(state, completed, text.decode(errors="replace"))

    def report_wait(self, status: str) -> None:
        words = self._words[self._rank]
        data = status.encode(errors="replace")[:_STATUS_TEXT]
        turn = (words[3] >> 16) + 1
        self._write(_place(turn), data)
        fence()
        words[3] = turn << 16 | len(data)

    def wait_status(self, rank: int) -> str:
        words = self._words[rank]
        while True:
            word = words[3]
            fence()
            data = self._read(rank, _place(word >> 16), min(word & 0xFFFF, _STATUS_TEXT))
            fence()
            # The text is overwritten only after the next one is published.
            if words[3] == word:
                return data.decode(errors="replace")

    def _write(self, place: int, data: bytes) -> None:
        self._memory[self._rank, place : place + len(data)] = np.frombuffer(data, np.uint8)

    def _read(self, rank: int, place: int, length: int) -> bytes:
        return bytes(self._memory[rank, place : place + length].tobytes())


def _place(turn: int) -> int:
    """Return where the wait status of this number is."""
    return _STATUS + (turn & 1) * _STATUS_TEXT
