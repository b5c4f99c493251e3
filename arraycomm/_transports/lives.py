"""Which processes of this node have died: each holds a lock, which the kernel frees at its end.

The locks are those of `fcntl`, on bytes of one file. Every kernel has them; they are seen from any
container that shares the file; and children, which inherit descriptors, do not inherit them.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from arraycomm._transports.notes import FAILED, GAVE_UP, Notes
from arraycomm._transports.shared_files import Agree, Tell, open_path, share_opened

# Seconds between two looks, and those for which a process may be gone before it is missed: it may
# have had nothing more to do.
_LOOK_EVERY: Final = 0.1
_SETTLING: Final = 0.5
# Seconds in which a death is known.
DELAY: Final = 2 * _SETTLING
_DARWIN: Final = sys.platform == "darwin"
# The kernel's record of a lock.
_LOCK: Final = struct.Struct("qqihh" if _DARWIN else "hhqqi0q")


class _LockFile:
    """The file in which each process of a node has a byte, at the `place` of this one."""

    def __init__(self, descriptor: int, place: int, size: int) -> None:
        self._descriptor, self._file = descriptor, os.fstat(descriptor)
        self._others = [other for other in range(size) if other != place]
        # When each process that is gone was first missed, by its place.
        self.gone: dict[int, float] = {}
        self._looked = 0.0
        with suppress(OSError):
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            os.pwrite(descriptor, b"\1", place)
        # At the end of the program other ranks are still looked after.
        own = descriptor, self._file, place, os.getpid()
        weakref.finalize(self, _leave, *own).atexit = False

    def look(self) -> None:
        """See which processes are gone, unless somebody has just looked."""
        now = time.monotonic()
        if now >= self._looked + _LOOK_EVERY and _is_open(self._descriptor, self._file):
            self._looked = now
            for place in self._others:
                # In this order: one that leaves takes its byte back first.
                if self._holder(place) is None and os.pread(self._descriptor, 1, place) == b"\1":
                    self.gone.setdefault(place, now)

    def holders(self) -> list[int]:
        """Return the other processes that live, and have a number here."""
        others = self._others if _is_open(self._descriptor, self._file) else []
        return [process for process in map(self._holder, others) if process]

    def _holder(self, place: int) -> int | None:
        """Return the process that holds a lock, None if none does; 0 if it has no number here."""
        free = fcntl.F_WRLCK, os.SEEK_SET
        asked = (place, 1, 0, *free) if _DARWIN else (*free, place, 1, 0)
        found = _LOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_GETLK, _LOCK.pack(*asked)))
        kind, process = (found[3], found[2]) if _DARWIN else (found[0], found[4])
        return None if kind == fcntl.F_UNLCK else process


def _leave(descriptor: int, file: os.stat_result, place: int, process: int) -> None:
    if _is_open(descriptor, file):
        if os.getpid() == process:
            os.pwrite(descriptor, b"\0", place)
        os.close(descriptor)


def _is_open(descriptor: int, file: os.stat_result) -> bool:
    """Return whether a descriptor is still that of a file: the program may have closed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), file)
    except OSError:
        return False


class Lives:
    """The processes of the other ranks of this node, each at its place in the file."""

    def __init__(self, places: Mapping[int, int], file: _LockFile | None = None) -> None:
        self._places, self._file = places, file

    def dead(self, notes: Notes) -> list[int]:
        """Return the ranks whose processes ended some time ago, and have not said that they do."""
        if self._file is None:
            return []
        self._file.look()
        gone = self._file.gone
        missed = [rank for rank, place in self._places.items() if place in gone]
        left = notes.exit_notices() if missed else {}
        # Those that have left may have followed one that has died.
        settled = time.monotonic() - (0.0 if left else _SETTLING)
        return [
            rank
            for rank in sorted(missed)
            if gone[self._places[rank]] <= settled
            and (rank not in left or left[rank].state in (FAILED, GAVE_UP))
        ]

    def end(self) -> None:
        """End the processes of all other ranks of the node, also of those not in this group."""
        for process in [] if self._file is None else self._file.holders():
            with suppress(OSError):
                os.kill(process, signal.SIGTERM)

    def of(self, members: Sequence[int]) -> Lives:
        """Return those of some ranks, in their new order."""
        kept = [(new, old) for new, old in enumerate(members) if old in self._places]
        return Lives({new: self._places[old] for new, old in kept}, self._file)


def find_lives(tell: Tell, agree: Agree, place: int, members: Sequence[int]) -> Lives:
    """Return the lives of a node's ranks, its `members`; this one is at a `place` among them.

    Collective over the node.
    """
    descriptor = share_opened(len(members), tell, agree, open_path, makes=place == 0)
    if descriptor is None:
        return Lives({})
    others = {rank: at for at, rank in enumerate(members) if at != place}
    return Lives(others, _LockFile(descriptor, place, len(members)))
