"""The control channel: each rank has a slot that all ranks of the group can read, for small steps.

A step is: write into `mine`, `post`, wait until it is `done`, read `rows`. Two slots (parities) are
used in turn, so no acknowledgement is needed: if all ranks have posted step k + 1, all have read
step k. A rank may be two steps ahead of others only in steps that carry nothing: it then leaves the
contents of its slots unchanged.

Layout of a slot, in words of 8 bytes: word 0 is the stamp (the step's number, written last), words
1 to 15 are the header's, and the payload starts at `PAYLOAD`.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

PAYLOAD: Final = 128
PREFIX: Final = slice(8, PAYLOAD)
MESSAGE_SLOT: Final = 256

# How a rank left a group; 0 if it has not. FAILED: it will make no further call here. GONE: its
# error has been printed, and its process ends. Without an error: what it ran came to its end
# (FINISHED), its process ends (ENDED), or its program has finalized MPI (FINALIZED).
FAILED, FINISHED, GONE, ENDED, FINALIZED = range(1, 6)
WELL: Final = (FINISHED, ENDED, FINALIZED)

# A rank's notes. Four words: how it left, the last step that it completed, the length of its exit
# text, and the number and length of its wait status. Then the exit text, and two places for wait
# statuses, used in turn, so that a reader always finds a complete one.
_TEXT: Final = 32
_EXIT_TEXT: Final = 4096
_STATUS: Final = _TEXT + _EXIT_TEXT
_STATUS_TEXT: Final = 512
_NOTES: Final = _STATUS + 2 * _STATUS_TEXT

_STRONGLY_ORDERED: Final = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_fence_lock = threading.Lock()


def fence() -> None:
    """Order memory accesses, by a lock's barriers, on processors that would reorder them."""
    if not _STRONGLY_ORDERED:
        _fence_lock.acquire()
        _fence_lock.release()


class ExitNotice(NamedTuple):
    """How a rank left: the state, the step of its last completed call, its traceback."""

    state: int
    step: int
    text: str


def _status_text(turn: int) -> int:
    """Return the offset of a wait status in a rank's notes; `turn` is its number."""
    return _STATUS + (turn & 1) * _STATUS_TEXT


def shared_slot(size: int) -> int:
    """Return the bytes of a slot in shared memory, for a group of `size` ranks."""
    return PAYLOAD + min(max((128 << 10) // size, 4 << 10), 32 << 10) // 8 * 8


class ControlChannel:
    """Slots that `post` publishes to the other ranks; the handle of this rank's current step.

    Attributes
    ----------
    shared : bool
        Whether the slots are in memory that all ranks share.
    step : int
        The number of the last step posted by this rank.
    words : list of memoryview
        For each parity, all slots as 64-bit words.
    rows : list of ndarray
        For each parity, the slots as bytes, shape (size, slot).
    mine : list of memoryview
        For each parity, the slot that this rank writes, as bytes.
    """

    shared = False

    def __init__(self, rank: int, size: int, rows: list[Any], mine: list[Any]) -> None:
        self.rank = rank
        self.size = size
        self.step = 0
        self.rows = rows
        self.slot = rows[0].shape[1]
        self.payload = self.slot - PAYLOAD
        self.words = [block.reshape(-1).data.cast("q") for block in rows]
        self.mine = [slot.data for slot in mine]
        self.my_words = [slot.cast("q") for slot in self.mine]
        self.stride: int = self.slot // 8
        # Words 1 to 15 of this rank's slots, if they are known.
        self.shown: list[bytes | None] = [None, None]
        # The last step in which a rank left a `raise_together` block by an exception, and how many
        # blocks it was in.
        self.left_together = (-1, 0)
        # Whether all ranks have seen the group end in a step; then no rank posts another step.
        self.ended = False
        self.peers = [r for r in range(size) if r != rank]

    def post(self) -> None:
        """Publish this rank's slot as its next step."""
        raise NotImplementedError

    def done(self) -> bool:
        """Tell whether every rank has posted the current step; never waits."""
        raise NotImplementedError

    def missing(self) -> list[int]:
        """Return the ranks that have not posted the current step, as far as this rank knows."""
        raise NotImplementedError

    def announce_exit(self, state: int, completed: int, text: str) -> None:
        """Tell the other ranks that this one joins no call after that of step `completed`.

        If it is called again, only the state changes.
        """
        raise NotImplementedError

    def exit_notices(self) -> dict[int, ExitNotice]:
        """Return the exit notices of the other ranks that have left."""
        raise NotImplementedError

    def report_wait(self, status: str) -> None:
        """Tell the other ranks which call this one is waiting in; empty if it no longer waits."""
        raise NotImplementedError

    def wait_status(self, rank: int) -> str:
        """Return which call `rank` is waiting in, or an empty string if it has not reported any."""
        raise NotImplementedError

    def ask_wait_status(self, ranks: Sequence[int]) -> None:
        """Ask these ranks for their wait status, if this channel needs to ask."""

    def answer_requests(self) -> None:
        """Answer the requests of other ranks; called while this rank waits for something else."""

    def close(self) -> None:
        """Release the memory or the MPI requests of the channel."""


class SharedControl(ControlChannel):
    """A control channel in memory that all ranks share, in one process or on one node.

    Every rank reads all slots, so slots are smaller if there are more ranks.
    """

    shared = True

    def __init__(self, rank: int, size: int, memory: np.ndarray[Any, Any]) -> None:
        slot = shared_slot(size)
        slots = memory[: 2 * size * slot].reshape(2, size, slot)
        super().__init__(rank, size, [slots[0], slots[1]], [slots[0, rank], slots[1, rank]])
        self._memory = memory
        notes = memory[2 * size * slot :][: size * _NOTES].reshape(size, _NOTES)
        self._notes = notes
        self._note_words = [note[:_TEXT].data.cast("q") for note in notes]
        self.stamps = [peer * self.stride for peer in self.peers]

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of zeroed memory that a group of `size` ranks shares."""
        return size * (2 * shared_slot(size) + _NOTES)

    def post(self) -> None:
        fence()
        self.step = step = self.step + 1
        self.my_words[step & 1][0] = step

    def done(self) -> bool:
        step = self.step
        words = self.words[step & 1]
        for stamp in self.stamps:
            if words[stamp] < step:
                return False
        fence()
        return True

    def missing(self) -> list[int]:
        words = self.words[self.step & 1]
        return [r for r in self.peers if words[r * self.stride] < self.step]

    def announce_exit(self, state: int, completed: int, text: str) -> None:
        words = self._note_words[self.rank]
        if not words[0]:
            data = text.encode(errors="replace")[-_EXIT_TEXT:]
            self._notes[self.rank, _TEXT : _TEXT + len(data)] = np.frombuffer(data, np.uint8)
            words[1], words[2] = completed, len(data)
            fence()
        words[0] = state

    def exit_notices(self) -> dict[int, ExitNotice]:
        return {peer: self._exit_notice(peer) for peer in self.peers if self._note_words[peer][0]}

    def _exit_notice(self, rank: int) -> ExitNotice:
        words = self._note_words[rank]
        state = words[0]
        fence()
        length = min(max(words[2], 0), _EXIT_TEXT)
        text = self._notes[rank, _TEXT : _TEXT + length].tobytes().decode(errors="replace")
        return ExitNotice(state, words[1], text)

    def report_wait(self, status: str) -> None:
        words = self._note_words[self.rank]
        data = status.encode(errors="replace")[:_STATUS_TEXT]
        turn = (words[3] >> 16) + 1
        place = _status_text(turn)
        self._notes[self.rank, place : place + len(data)] = np.frombuffer(data, np.uint8)
        fence()
        words[3] = turn << 16 | len(data)

    def wait_status(self, rank: int) -> str:
        words = self._note_words[rank]
        while True:
            word = words[3]
            fence()
            place, length = _status_text(word >> 16), min(word & 0xFFFF, _STATUS_TEXT)
            data = self._notes[rank, place : place + length].tobytes()
            fence()
            # The text is overwritten only after the next one is published.
            if words[3] == word:
                return data.decode(errors="replace")

    def close(self) -> None:
        """Release the memory now: Python collects the channel late, since it is in a cycle."""
        self.rows, self.words, self.mine, self.my_words = [], [], [], []
        self._memory, self._notes = np.empty(0, np.uint8), np.empty((0, _NOTES), np.uint8)
        self._note_words = []
