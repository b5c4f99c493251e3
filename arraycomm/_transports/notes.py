"""Notes: what each rank tells the others beside its steps, in memory that all of them share.

A rank's notes begin with four words: how it left, the last step that it completed, the length of its
exit text, and the number and length of its wait status. Then come the exit text and two places for
wait statuses, used in turn, so that a reader always finds a complete one.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._transports.memory_order import fence

_TEXT: Final = 32
_EXIT_TEXT: Final = 4096
_STATUS: Final = _TEXT + _EXIT_TEXT
_STATUS_TEXT: Final = 512
NOTES_BYTES: Final = _STATUS + 2 * _STATUS_TEXT


class ExitNotice(NamedTuple):
    """How a rank left: the state, the step of its last completed call, its traceback."""

    state: int
    step: int
    text: str


class Notes:
    """The notes of all ranks, in memory of shape (size, NOTES_BYTES); `rank` writes its own."""

    def __init__(self, rank: int, memory: np.ndarray[Any, Any]) -> None:
        self._rank, self._memory = rank, memory
        self._words = [note[:_TEXT].data.cast("q") for note in memory]

    def leave(self, state: int, completed: int, text: str) -> None:
        """Publish that this rank has left; later calls only change the state."""
        words = self._words[self._rank]
        if not words[0]:
            data = text.encode(errors="replace")[-_EXIT_TEXT:]
            self._write(_TEXT, data)
            words[1], words[2] = completed, len(data)
            fence()
        words[0] = state

    def exit_notice(self, rank: int) -> ExitNotice | None:
        """Return how a rank left, or None if it has not."""
        words = self._words[rank]
        state = words[0]
        if not state:
            return None
        fence()
        text = self._read(rank, _TEXT, min(max(words[2], 0), _EXIT_TEXT))
        return ExitNotice(state, words[1], text.decode(errors="replace"))

    def report(self, status: str) -> None:
        """Publish this rank's wait status."""
        words = self._words[self._rank]
        data = status.encode(errors="replace")[:_STATUS_TEXT]
        turn = (words[3] >> 16) + 1
        self._write(_place(turn), data)
        fence()
        words[3] = turn << 16 | len(data)

    def status(self, rank: int) -> str:
        """Return a rank's wait status."""
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
