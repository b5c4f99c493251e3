"""The clock by which waits are measured: time in which this process was stopped does not count.

A batch system suspends a job by stopping its processes, a user by Ctrl-Z. Nobody was missing then.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

# Seconds between two looks at the clock that count at most. A rank that waits looks every few
# milliseconds, and a busy machine may let it wait a second for its core.
LONGEST_GAP: Final = 1.0


class WaitClock:
    """Seconds of this process, without those in which none of its threads looked at this clock.

    A rank looks at it throughout every wait. Only differences between two looks of one wait have a
    meaning: a computation between them counts as one gap.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start now, with nothing missed; in a forked child too, where no thread frees the lock."""
        self._missed, self._last = 0.0, time.monotonic()
        # A signal's handler may wait as well.
        self._lock = threading.RLock()

    def now(self) -> float:
        """Return the seconds so far; this is a look."""
        with self._lock:
            seen = time.monotonic()
            self._missed += max(seen - self._last - LONGEST_GAP, 0.0)
            self._last = seen
            return seen - self._missed

    def last_look(self) -> float:
        """Return the time of the last look, without looking."""
        return self._last


_clock = WaitClock()
os.register_at_fork(after_in_child=_clock.begin_anew)
now: Final = _clock.now
last_look: Final = _clock.last_look
