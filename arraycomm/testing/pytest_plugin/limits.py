"""The limit of a test on this rank: what takes longer is interrupted, and shown with its stack.

A test runs in the main thread, which a signal interrupts in Python, and in most calls that wait for
the system. One long-lived thread watches: to begin one for each test takes longer than most tests.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from types import FrameType
from typing import Final

from arraycomm.testing._ranks.interrupt import Interruption, stack_of
from arraycomm.testing._ranks.threads import RETRY
from arraycomm.testing.pytest_plugin.progress import Progress

# Seconds after which an interrupted test must be stuck outside Python.
_HOPELESS: Final = 1.6
# Seconds after which a rank that waits for the others does not wait for a stuck one any more.
_PATIENCE: Final = 10.0
_LOOK: Final = 0.02
_SIGNAL: Final = getattr(signal, "SIGRTMAX", signal.SIGUSR2 + 3) - 3


class GaveUp(BaseException):
    """Another rank does not come to the end of a test."""


class Limit:
    """Watches one phase of a test after another."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._ident = threading.get_ident()
        self._deadline = math.inf
        # Whether a phase has begun and not ended, so that it may be interrupted.
        self.inside = False
        # Whether this rank waits for the others to end the test, which `GaveUp` ends.
        self.waiting = False
        self._hopeless = False
        self._wake = threading.Condition()
        self._next = math.inf
        self._pid = os.getpid()
        signal.signal(_SIGNAL, self._arrive)
        threading.Thread(target=self._watch, name="arraycomm limit", daemon=True).start()

    def begin(self, seconds: float) -> None:
        """Begin a phase, of which an infinite number of seconds sets no limit."""
        self._hopeless = self.waiting = False
        self.inside = True
        self._deadline = time.monotonic() + seconds
        if self._deadline < self._next:
            with self._wake:
                self._wake.notify()

    def end(self) -> None:
        """End the phase."""
        self._deadline, self.waiting = math.inf, False

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        if time.monotonic() < self._deadline:
            return
        if self.inside:
            raise Interruption
        if self.waiting:
            raise GaveUp

    def _watch(self) -> None:
        while True:
            with self._wake:
                deadline = self._next = self._deadline
                left = deadline - time.monotonic()
                if left > 0:
                    # A phase that begins later ends later, unless it says otherwise.
                    self._wake.wait(min(left, threading.TIMEOUT_MAX))
                    continue
            self._rescue(deadline)

    def _rescue(self, deadline: float) -> None:
        """Interrupt the test until it ends; then wait for the others, but not for ever."""
        attempt = 0.0
        while self._deadline == deadline:
            late = time.monotonic() - deadline
            if self.inside and late > attempt:
                self._interrupt()
                attempt += RETRY
            if self.inside and late > _HOPELESS and not self._hopeless:
                self._hopeless = True
                self._progress.tell_stuck(stack_of(self._ident))
            if self.waiting and (self._progress.is_stuck() or late > _PATIENCE):
                self._interrupt()
                time.sleep(RETRY)
            time.sleep(_LOOK)

    def _interrupt(self) -> None:
        if os.getpid() == self._pid:
            signal.pthread_kill(self._ident, _SIGNAL)
