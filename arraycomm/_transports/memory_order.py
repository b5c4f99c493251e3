"""The order in which processes see one another's writes to memory that they share."""

from __future__ import annotations

import platform
import threading
from typing import Final

_STRONGLY_ORDERED: Final = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
_fence_lock = threading.Lock()


def fence() -> None:
    """Order memory accesses, by a lock's barriers, on processors that would reorder them."""
    if not _STRONGLY_ORDERED:
        _fence_lock.acquire()
        _fence_lock.release()
