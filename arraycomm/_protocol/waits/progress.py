"""The thread that pushes on what a communicator has outstanding, while the caller computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Protocol

from arraycomm._native import compiled
from arraycomm._protocol.waits import clock
from arraycomm._protocol.waits.waiting import NAP, PATIENCE, give_up_core, nap_of
from arraycomm._transports.base import Handle
from arraycomm._transports.control import ControlChannel, SharedControl

# Seconds in which ranks that call at about the same time have all called.
_GLANCE: Final = 2e-4
# Polls between two times that the thread gives up the core.
_POLLS: Final = 32
# Seconds without the GIL: the longest wait for a rank that is late.
_ASIDE: Final = 0.01
# Seconds that the thread stays for the next program: to start another one takes longer than a short
# message.
_LINGER: Final = 0.05


class Program(Protocol):
    """What the thread sees of a program under way."""

    waiting: Handle | None
    since: float


class ProgressThread:
    """Calls `advance(polls)` in a thread that outlives the last `active` program by a moment."""

    # Whether the system has refused this process a thread.
    refused: ClassVar[bool] = False

    def __init__(
        self, advance: Callable[[int], None], active: Callable[[], Sequence[Program]]
    ) -> None:
        self._advance, self._active = advance, active
        self._thread: threading.Thread | None = None
        # Held by who looks at the thread's state: whether it waits for a program, and whether it
        # may.
        self._state = threading.Lock()
        self._lingers, self._may_linger = False, True
        # Released to end that wait.
        self._wake = threading.Lock()
        self._wake.acquire()
        # Whether a caller waits just now and pushes on by itself: two would take turns for the
        # core.
        self._aside = False
        # Set to end a wait without the GIL.
        self._woken = memoryview(bytearray(4)).cast("i")

    def set_aside(self, aside: bool) -> None:
        """Leave the programs to a caller, or do so no more."""
        self._aside = aside
        self._woken[0] = 1

    def start(self) -> None:
        """Start the thread, if it does not run; have it look at its programs, if it does."""
        self._woken[0] = 1
        with self._state:
            if self._lingers:
                self._end_lingering()
            elif self._thread is None:
                thread = threading.Thread(target=self._run, name="arraycomm-progress", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    # From now on every wait of this process pushes on all that is outstanding.
                    ProgressThread.refused = True
                else:
                    self._thread = thread

    def join(self, seconds: float) -> None:
        """Wait for the thread, if it runs."""
        with self._state:
            thread, self._may_linger = self._thread, False
            self._woken[0] = 1
            if self._lingers:
                self._end_lingering()
        if thread is not None:
            thread.join(seconds)
        self._may_linger = True

    def _end_lingering(self) -> None:
        self._lingers = False
        self._wake.release()

    def _run(self) -> None:
        while self._has_programs():
            self._woken[0] = 0
            if not self._aside:
                # Some MPI move a piece of the data with each poll. Late ranks come after one as
                # well.
                self._advance(_POLLS if self._moves() else 1)
            if not self._aside and self._wait_without_gil():
                continue
            # Data moves only while somebody polls; ranks that are late come without that.
            if self._moves() and not self._aside:
                give_up_core()
            else:
                time.sleep(self._nap())

    def _wait_without_gil(self) -> bool:
        """Wait for late ranks in shared memory if the only program does; return whether it does."""
        programs = self._active()
        if compiled is None or len(programs) != 1:
            return False
        waiting = programs[0].waiting
        if not isinstance(waiting, SharedControl):
            return False
        waited, slots = clock.now() - programs[0].since, waiting.slots
        if not len(slots) or not waiting.looking.acquire(blocking=False):
            # It is being closed.
            return False
        try:
            size, slot, step = waiting.size, waiting.slot, waiting.step
            compiled.wait_aside(slots, size, slot, step, waited, _ASIDE, self._woken)
        finally:
            waiting.looking.release()
        return True

    def _has_programs(self) -> bool:
        """Return whether there are programs, after a moment for new ones; else the thread ends."""
        with self._state:
            if self._active():
                return True
            self._lingers = lingers = self._may_linger
        if lingers:
            self._wake.acquire(timeout=_LINGER)
        with self._state:
            if lingers and not self._lingers:
                # Released after the time was up, or acquired before.
                self._wake.acquire(blocking=False)
            self._lingers = False
            if self._active():
                return True
            self._thread = None
            return False

    def _nap(self) -> float:
        """Return the seconds to sleep: more if all programs have long waited for absent ranks."""
        now, programs = clock.now(), self._active()
        if not all(isinstance(program.waiting, ControlChannel) for program in programs):
            return NAP
        waited = now - max((program.since for program in programs), default=now)
        return nap_of(waited, aside=True)

    def _moves(self) -> bool:
        """Return whether data is under way, or has been until a moment ago."""
        now = clock.now()
        return any(
            now - program.since
            < (_GLANCE if isinstance(program.waiting, ControlChannel) else PATIENCE)
            for program in self._active()
        )
