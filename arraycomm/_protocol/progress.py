"""The thread that pushes on what a communicator has outstanding, while the caller computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Protocol

from arraycomm._protocol import clock
from arraycomm._protocol.waiting import NAP, PATIENCE, give_up_core
from arraycomm._transports.base import Handle
from arraycomm._transports.control import ControlChannel

# Seconds in which ranks that call at about the same time have all called.
_GLANCE: Final = 2e-4
# Polls between two times that the thread gives up the core.
_POLLS: Final = 32


class Program(Protocol):
    """What the thread sees of a program under way."""

    waiting: Handle | None
    since: float


class ProgressThread:
    """Calls `advance(polls)` in a thread that lives only while there are `active` programs."""

    # Whether the system has refused this process a thread.
    refused: ClassVar[bool] = False

    def __init__(
        self, advance: Callable[[int], None], active: Callable[[], Sequence[Program]]
    ) -> None:
        self._advance, self._active = advance, active
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        # Whether a caller waits just now and pushes on by itself: two would take turns for the core.
        self.aside = False

    def start(self) -> None:
        """Start the thread, if it does not run."""
        with self._starting:
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
        if (thread := self._thread) is not None:
            thread.join(seconds)

    def _run(self) -> None:
        while True:
            if not self.aside:
                # Some MPI move a piece of the data with each poll.
                self._advance(_POLLS)
            with self._starting:
                if not self._active():
                    self._thread = None
                    return
            # Data moves only while somebody polls; ranks that are late come without that.
            if self._moves() and not self.aside:
                give_up_core()
            else:
                time.sleep(NAP)

    def _moves(self) -> bool:
        """Tell whether data is under way, or has been until a moment ago."""
        now = clock.now()
        return any(
            now - program.since
            < (_GLANCE if isinstance(program.waiting, ControlChannel) else PATIENCE)
            for program in self._active()
        )
