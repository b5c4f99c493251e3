"""The control channel: each rank has a slot that all ranks of the group can read, for small steps.

A step is: write into `mine`, `post`, wait until it is `done`, read `rows`. Two slots (parities) are
used in turn, so no acknowledgement is needed: if all ranks have posted step k + 1, all have read
step k. A rank may be two steps ahead of others only in steps that carry nothing: it then leaves the
contents of its slots unchanged.

A rank that gives up takes its step back: see `SharedControl.withdraw`.

Layout of a slot, in words of 8 bytes: word 0 is the stamp (the step's number, written last), words
1 to 15 are the header's, and the payload starts at `PAYLOAD`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import MutableSequence
from typing import Any, Final

import numpy as np

from arraycomm._native import compiled
from arraycomm._transports.notes import NOTES_BYTES, WELL, ExitNotice, Notes, SharedNotes, fence

PAYLOAD: Final = 128
PREFIX: Final = slice(8, PAYLOAD)
# The bytes that a rank reads from others' slots in the time by which a segment takes longer to
# start; and the most and the least bytes of payload in a slot.
_READ: Final = 1 << 20
_LARGEST: Final = 1 << 20
_LEAST: Final = 4 << 10
# Stamps that are looked at one by one.
_FEW: Final = 9
# Stamps of a rank that is giving up, and of one that has. Seconds in which others that are giving
# up at the same time decide.
_WITHDRAWING: Final = -1
_WITHDRAWN: Final = -2
_DECIDING: Final = 1.0
_NAP: Final = 1e-3
_SHOWN: Final = 0.01
# The least bytes of a slot between nodes, and the most that all slots of a step have as payload
# there.
_MESSAGE_SLOT: Final = 256
_MESSAGES: Final = 1 << 20


def shared_slot(size: int) -> int:
    """Return the bytes of a slot in shared memory, for a group of `size` ranks.

    Of arrays of n bytes in slots, a rank reads (size - 1) n bytes of others; through a segment it
    reads 2 (size - 1) n / size.
    """
    more = (size - 1) * (size - 2)
    return PAYLOAD + min(max(_READ * size // max(more, 1), _LEAST), _LARGEST) // 8 * 8


def message_slot(size: int) -> int:
    """Return the bytes of a slot between nodes, for a group of `size` ranks."""
    least = _MESSAGE_SLOT - PAYLOAD
    # Slots of two ranks go straight to one another.
    most = _MESSAGES if size == 2 else _MESSAGES // size
    return PAYLOAD + max(most, least) // 8 * 8


def _fence_everywhere() -> None:
    """Have every thread of this machine show what it has written before it reads on."""
    if compiled is None:
        # Every processor has shown its writes by then.
        time.sleep(_SHOWN)
    else:
        compiled.fence_everywhere()


# The native part makes steps by itself, also without the GIL, and counts them.
_Counts: Final[Any] = object if compiled is None else compiled.Counts


class ControlChannel(_Counts):  # type: ignore[misc]
    """Slots that `post` publishes to the other ranks; the handle of this rank's current step.

    Lists have an element for each parity.
    """

    # Whether the slots are in memory that all ranks share.
    shared = False
    # All slots as bytes, and what takes whole steps between nodes in the native part, if anything
    # does.
    slots: Any = None
    native: Any = None

    def __init__(self, rank: int, size: int, rows: list[Any], mine: list[Any]) -> None:
        self.rank, self.size = rank, size
        # The number of the last step posted by this rank.
        self.step = 0
        # The step of the last call that this rank completed.
        self.completed = 0
        # The slots of all ranks as bytes, of shape (size, slot), and all of them as 64-bit words.
        self.rows = rows
        self.words = [block.reshape(-1).data.cast("q") for block in rows]
        self.slot = rows[0].shape[1]
        self.stride: int = self.slot // 8
        self.payload = self.slot - PAYLOAD
        # The slot that this rank writes.
        self.mine = [slot.data for slot in mine]
        self.my_words = [slot.cast("q") for slot in self.mine]
        # Whether all ranks show the words of this one: others' slots may then lack them.
        self.alike: MutableSequence[Any] = [False, False]
        # What the ranks tell one another beside these steps.
        self.notes = Notes()
        # The last step in which a rank left a `raise_together` block by an exception, how many
        # blocks it was in, and what those that did so told.
        self.left_together: tuple[int, int, Any] = (-1, 0, ())
        # Whether all ranks have seen the group end in a step; then no rank posts another step.
        self.ended = False
        self.peers = [r for r in range(size) if r != rank]

    def post(self, nbytes: int | None = None) -> None:
        """Publish this rank's slot as its next step: `nbytes` of the payload, or all.

        What other ranks find behind these bytes is undefined.
        """
        raise NotImplementedError

    def go_on(self) -> None:
        """Wait for the rest of a step that `native` has begun, by `done`."""

    def done(self) -> bool:
        """Return whether every rank has posted the current step; never waits."""
        raise NotImplementedError

    def missing(self) -> list[int]:
        """Return the ranks that have not posted the current step, as far as this rank knows."""
        raise NotImplementedError

    def withdrawing(self) -> list[int]:
        """Return the missing ranks that have come, but have given the step up or are about to."""
        return []

    def withdraw(self) -> bool:
        """Give up the current step; return whether that is possible: not if all ranks have it."""
        return True

    def given_up(self) -> dict[int, ExitNotice]:
        """Return the notices of the ranks that have failed before they completed this step."""
        left = self.notes.exit_notices()
        return {r: n for r, n in left.items() if n.state not in WELL and n.step < self.step}

    def close(self) -> None:
        """Release the memory or the MPI requests of the channel."""


class SharedControl(ControlChannel):
    """A control channel in shared memory; every rank reads all slots."""

    shared = True

    def __init__(self, rank: int, size: int, memory: np.ndarray[Any, Any]) -> None:
        slot = shared_slot(size)
        self._memory, self.slots = memory, memory[: 2 * size * slot]
        slots = self.slots.reshape(2, size, slot)
        super().__init__(rank, size, [slots[0], slots[1]], [slots[0, rank], slots[1, rank]])
        notes = memory[2 * size * slot :][: size * NOTES_BYTES]
        self.notes = SharedNotes(rank, notes.reshape(size, NOTES_BYTES))
        self.stamps = [r * self.stride for r in range(min(size, _FEW))]
        # Of two ranks, one alone is looked at.
        self._looks = 1 if size <= 2 else 2
        self._all_stamps = [words[:: self.stride] for words in self.words]
        # Held by a thread that reads the slots without the GIL.
        self.looking = threading.Lock()

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of zeroed memory that a group of `size` ranks shares."""
        return size * (2 * shared_slot(size) + NOTES_BYTES)

    def post(self, nbytes: int | None = None) -> None:
        fence()
        self.step = step = self.step + 1
        self.my_words[step & 1][0] = step

    def done(self) -> bool:
        step = self.step
        words = self.words[step & 1]
        # Twice: while others were looked at, a rank may have taken its step back.
        for _ in range(self._looks):
            for stamp in self.stamps:
                if words[stamp] < step:
                    return False
            if self.size > _FEW and min(self._all_stamps[step & 1].tolist()) < step:
                return False
            fence()
        return True

    def missing(self) -> list[int]:
        words = self.words[self.step & 1]
        return [r for r in self.peers if words[r * self.stride] < self.step]

    def withdrawing(self) -> list[int]:
        words = self.words[self.step & 1]
        return [r for r in self.peers if words[r * self.stride] < 0]

    def withdraw(self) -> bool:
        """Give up the current step, so that no rank completes it, unless all ranks have come to it.

        A rank completes a step if all stamps show it at one time. If they did before this one was
        changed, this rank sees all the others afterwards, and takes the change back. Others that
        give up at the same time are among them: they do the same.
        """
        step, taken = self.step, self.done()
        stamps, own = self._all_stamps[step & 1], self.my_words[step & 1]
        if not taken and own[0] != _WITHDRAWN:
            try:
                own[0] = _WITHDRAWING
                _fence_everywhere()
                if all(s >= step or s == _WITHDRAWING for s in stamps.tolist()):
                    own[0] = step
                    taken = self._is_done_after(_DECIDING)
            finally:
                own[0] = step if taken else _WITHDRAWN
        return not taken

    def _is_done_after(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (done := self.done()) and time.monotonic() < end:
            time.sleep(_NAP)
        return done

    def close(self) -> None:
        """Release the memory now: Python collects the channel late, since it is in a cycle."""
        self.slots = np.empty(0, np.uint8)
        self.looking.acquire(timeout=1)
        self.rows, self.words, self.mine, self.my_words = [], [], [], []
        self._all_stamps = []
        self._memory = self.slots
        self.notes = SharedNotes(self.rank, np.empty((0, NOTES_BYTES), np.uint8))
