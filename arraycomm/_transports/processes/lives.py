"""Which processes of this node have died: the kernel tells of each that was looked up alive."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

# Seconds for which a process may be gone before it is missed: it may have had nothing more to do.
_SETTLING: Final = 0.5
# Seconds in which a death is known.
DELAY: Final = 2 * _SETTLING
_NAMESPACE: Final = "/proc/self/ns/pid"


class Lives:
    """The processes of the other ranks, as far as this one can see them.

    Those in another container, where processes have other numbers, are never found to be dead.
    """

    def __init__(self, descriptors: dict[int, int], first: Lives | None = None) -> None:
        self._descriptors = descriptors
        # The descriptors are closed with the first one.
        self._first = first
        self._gone_at: dict[int, float] = {}
        self._polling = threading.Lock()
        self._poll = select.poll()
        self._ranks = {descriptor: rank for rank, descriptor in descriptors.items()}
        for descriptor in self._ranks:
            # Readable once the process has ended; its number may go to another one.
            self._poll.register(descriptor, select.POLLIN)

    def dead(self, *, at_once: bool = False) -> list[int]:
        """Return the ranks whose processes ended some time ago; if `at_once`, all that ended."""
        now = time.monotonic()
        if self._polling.acquire(blocking=False):
            try:
                for descriptor, _ in self._poll.poll(0):
                    self._gone_at.setdefault(self._ranks[descriptor], now)
            finally:
                self._polling.release()
        settled = now if at_once else now - _SETTLING
        return sorted(rank for rank, at in list(self._gone_at.items()) if at <= settled)

    def end(self) -> None:
        """End the processes of all other ranks, also of those that are not in this group."""
        first = self
        while first._first is not None:
            first = first._first
        for descriptor in first._descriptors.values():
            with suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)

    def of(self, members: Sequence[int]) -> Lives:
        """Return those of some ranks, in their new order."""
        kept = {new: old for new, old in enumerate(members) if old in self._descriptors}
        return Lives({new: self._descriptors[old] for new, old in kept.items()}, self)


def find_lives(
    put: Callable[[str, str], object], get: Callable[[str], str], rank: int, size: int
) -> Lives:
    """Look up the processes of all ranks, which call this with a store that all can reach."""
    put(f"process/{rank}", f"{os.getpid()} {_namespace()}")
    said = {other: get(f"process/{other}").split(" ", 1) for other in range(size) if other != rank}
    descriptors: dict[int, int] = {}
    if hasattr(os, "pidfd_open"):
        for other, (pid, namespace) in said.items():
            with suppress(OSError):
                if namespace == _namespace():
                    descriptors[other] = os.pidfd_open(int(pid))
    found = Lives(descriptors)
    # At the end of the program other ranks are still looked after.
    weakref.finalize(found, _close, list(descriptors.values())).atexit = False
    # All have looked before the first one can end.
    put(f"looked/{rank}", "yes")
    for other in range(size):
        get(f"looked/{other}")
    return found


def _namespace() -> str:
    try:
        return os.readlink(_NAMESPACE)
    except OSError:
        return ""


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
