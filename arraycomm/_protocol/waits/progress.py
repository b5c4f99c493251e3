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

# Seconds in which ranks that call at about the same time have all called: nobody asks before why
# others are late. After them the thread takes up what a caller leaves alone. Most wait at once, and
# would share the interpreter.
GLANCE: Final = 2e-4
# Polls between two times that the thread gives up the core.
_POLLS: Final = 32
# Seconds without the GIL: the longest wait for a rank that is late.
_ASIDE: Final = 0.01
# Seconds that the thread stays without a program: to start another one takes longer than a short
# message.
_LINGER: Final = 0.05


class Program(Protocol):
    """What the thread sees of a program under way."""

    waiting: Handle | None
    since: float


class ProgressThread:
    """Calls `advance(polls)` while `active` programs are left to it, and outlives them by a moment.

    A caller that waits takes the programs over, and pushes on by itself. If `advance` raises, the
    thread ends, and calls `lose(error)`.
    """

    # Whether the system has refused this process a thread.
    refused: ClassVar[bool] = False
    # What the thread does before it pushes on, if this process uses devices.
    prepare: ClassVar[Callable[[], None] | None] = None

    def __init__(
        self,
        advance: Callable[[int], None],
        active: Callable[[], Sequence[Program]],
        lose: Callable[[BaseException], None],
    ) -> None:
        self._advance, self._active, self._lose = advance, active, lose
        self._thread: threading.Thread | None = None
        # Held by who starts the thread or ends it, or leaves programs to it.
        self._state = threading.Lock()
        # The number of the latest time that programs were left to the thread, 0 while it has none.
        self._times = self._left = 0
        # That of the programs which it has taken up.
        self._taken = 0
        self._may_linger = True
        # Set to end a wait without the GIL.
        self._woken = memoryview(bytearray(4)).cast("i")

    def take_over(self) -> None:
        """Leave the programs to a caller until the next `start`."""
        self._left = 0
        self._woken[0] = 1

    def start(self) -> None:
        """Leave what is outstanding to the thread; have it look again if it does that already."""
        with self._state:
            if not self._left:
                self._times += 1
                self._left = self._times
            self._woken[0] = 1
            if self._thread is None:
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
        if thread is not None:
            thread.join(seconds)
        self._may_linger = True

    def _run(self) -> None:
        try:
            while self._has_programs():
                self._push()
        except BaseException as error:
            # A later program begins another thread.
            self._thread = None
            self._lose(error)

    def _has_programs(self) -> bool:
        """Return whether programs have been left for a moment; False, and it ends, if none come."""
        waited, before = 0.0, self._taken
        while True:
            with self._state:
                if not self._active():
                    self._left = 0
                left = self._left
                if left and left == before:
                    self._taken = left
                    return True
                if not left and not (self._may_linger and waited < _LINGER):
                    self._thread = None
                    return False
            before = left
            time.sleep(GLANCE)
            waited = 0.0 if left else waited + GLANCE

    def _push(self) -> None:
        self._woken[0] = 0
        if ProgressThread.prepare is not None:
            ProgressThread.prepare()
        # Some MPI move a piece of the data with each poll. Late ranks come after one as well.
        self._advance(_POLLS if self._moves() else 1)
        if self._left != self._taken or self._wait_without_gil():
            return
        # Data moves only while somebody polls; ranks that are late come without that.
        if self._moves():
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
            < (GLANCE if isinstance(program.waiting, ControlChannel) else PATIENCE)
            for program in self._active()
        )
