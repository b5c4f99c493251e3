"""The control channel: one slot a rank that all ranks of a group can read, for small steps in lock step.

A step is: write into `mine`, `post`, wait until it is `done`, read `rows`. Slots are used in turn
(two parities), so no acknowledgement is needed: who sees everyone's step k + 1 knows that
everyone has finished reading step k. A rank may be two steps on where these show nothing but that
they were reached: it has left what the slot shows as it was.

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

# How a rank's part in a group ended; 0 while it has not. FAILED: it will make no further call
# here. GONE: its error has been printed, and its process ends. FINISHED: its program ended well.
FAILED: Final = 1
FINISHED: Final = 2
GONE: Final = 3

# A rank's notes: the state in which it left, the last step that it completed, the length of the
# text on that, and which text says what it is waiting in; the text on how it left, and two in turn
# on what it is waiting in, so that a reader always finds a whole one.
_TEXT: Final = 32
_FAREWELL_TEXT: Final = 4096
_DOING: Final = _TEXT + _FAREWELL_TEXT
_DOING_TEXT: Final = 512
_NOTES: Final = _DOING + 2 * _DOING_TEXT

_STRONGLY_ORDERED: Final = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_fence_lock = threading.Lock()


def fence() -> None:
    """Order memory accesses on processors that would reorder them: a lock's own barriers do."""
    if not _STRONGLY_ORDERED:
        _fence_lock.acquire()
        _fence_lock.release()


class ExitNotice(NamedTuple):
    """How a rank left: its state, the step of the last call that it completed, its traceback."""

    state: int
    step: int
    text: str


def _doing_text(turn: int) -> int:
    """Return where among a rank's notes the text of a turn lies."""
    return _DOING + (turn & 1) * _DOING_TEXT


def shared_slot(size: int) -> int:
    """Return the bytes of a slot in shared memory, for a group of `size` ranks."""
    return PAYLOAD + min(max((128 << 10) // size, 4 << 10), 32 << 10) // 8 * 8


class ControlChannel:
    """Slots that `post` shows to the other ranks; a control channel is the handle of its current step.

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
        For each parity, this rank's slot to write into, as bytes.
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
        # What this rank's slots show in their words 1 to 15, where that is known.
        self.shown: list[bytes | None] = [None, None]
        # The last step in which a rank left a block of `raise_together` by an exception, and how many
        # blocks it was in.
        self.left_together = (-1, 0)
        # Whether all ranks have seen the group end in a step: no rank posts another.
        self.ended = False
        self.peers = [r for r in range(size) if r != rank]

    def post(self) -> None:
        """Publish this rank's slot as its next step."""
        raise NotImplementedError

    def done(self) -> bool:
        """Tell whether every rank has posted the current step; never waits."""
        raise NotImplementedError

    def missing(self) -> list[int]:
        """Ranks that have not posted the current step, as far as this rank can see."""
        raise NotImplementedError

    def leave(self, state: int, completed: int, text: str) -> None:
        """Say that this rank takes part in nothing after the call of step `completed`.

        Said again, only the state changes.
        """
        raise NotImplementedError

    def exit_notices(self) -> dict[int, ExitNotice]:
        """Return how other ranks left, of those that have."""
        raise NotImplementedError

    def tell(self, doing: str) -> None:
        """Let the other ranks know what this one is waiting in; empty when it is not any more."""
        raise NotImplementedError

    def told(self, rank: int) -> str:
        """Return what `rank` is waiting in, or an empty string where it has not told."""
        raise NotImplementedError

    def ask(self, ranks: Sequence[int]) -> None:
        """Have these ranks tell what they are waiting in, where that has to be asked for."""

    def attend(self) -> None:
        """Answer the ranks that ask; called while waiting for something else."""

    def close(self) -> None:
        """Release what the control channel holds."""


class SharedControl(ControlChannel):
    """A control channel in memory that all ranks share: of one process, or of one node.

    The more ranks, the smaller the slots: every rank reads all of them.
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
        """Bytes of zeroed memory that a group of `size` ranks shares."""
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

    def leave(self, state: int, completed: int, text: str) -> None:
        words = self._note_words[self.rank]
        if not words[0]:
            data = text.encode(errors="replace")[-_FAREWELL_TEXT:]
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
        length = min(max(words[2], 0), _FAREWELL_TEXT)
        text = self._notes[rank, _TEXT : _TEXT + length].tobytes().decode(errors="replace")
        return ExitNotice(state, words[1], text)

    def tell(self, doing: str) -> None:
        words = self._note_words[self.rank]
        data = doing.encode(errors="replace")[:_DOING_TEXT]
        turn = (words[3] >> 16) + 1
        place = _doing_text(turn)
        self._notes[self.rank, place : place + len(data)] = np.frombuffer(data, np.uint8)
        fence()
        words[3] = turn << 16 | len(data)

    def told(self, rank: int) -> str:
        words = self._note_words[rank]
        while True:
            word = words[3]
            fence()
            place, length = _doing_text(word >> 16), min(word & 0xFFFF, _DOING_TEXT)
            data = self._notes[rank, place : place + length].tobytes()
            fence()
            # It is written over only when the next text has been told.
            if words[3] == word:
                return data.decode(errors="replace")

    def close(self) -> None:
        """Let go of the memory now: this control channel is part of a cycle, which Python collects late."""
        self.rows, self.words, self.mine, self.my_words = [], [], [], []
        self._memory, self._notes = np.empty(0, np.uint8), np.empty((0, _NOTES), np.uint8)
        self._note_words = []
