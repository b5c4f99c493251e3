"""Ranks as threads: how each begins and ends, and how none is left behind."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from arraycomm._callsite import describe_exception
from arraycomm._communicator import Communicator
from arraycomm._errors import CommTimeoutError, CommunicatorClosedError
from arraycomm._transports.control import FAILED, FINISHED
from arraycomm.testing._interrupt import Interruptible, Interruption
from arraycomm.testing._schedule import Baton

# Seconds beyond the timeout in which a rank that waits in arraycomm has long given up.
SLACK: Final = 0.5
# Seconds in which a rank that is interrupted in Python ends, and between two attempts.
HOPELESS: Final = 3.0
AGAIN: Final = 0.5

Events = queue.SimpleQueue[Callable[[], Any] | None]


class RankThread:
    """One rank's thread, and how it ended."""

    def __init__(
        self, comm: Communicator, body: Callable[[Communicator], Any], baton: Baton | None = None
    ) -> None:
        self.comm = comm
        self.rank = comm.rank
        self._body = body
        self._baton = baton
        self.result: Any = None
        self.error: BaseException | None = None
        self.part: Interruptible | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name=f"rank {comm.rank}", daemon=True
        )
        self._events: Events | None = None

    @property
    def step(self) -> int:
        """The step of the communicator up to which all went well."""
        return self.comm._completed

    def start(self, events: Events) -> None:
        """Begin; a None in `events` tells that the rank has ended."""
        self._events = events
        self._thread.start()

    def _run(self) -> None:
        self.part = part = Interruptible(self.rank, threading.get_ident())
        try:
            self._take_part(part)
            self._leave()
        except Interruption:
            # It was under way when the rank ended by itself.
            self._leave()
        finally:
            if self._baton is not None:
                self._baton.leave(self.rank)
            assert self._events is not None
            self._events.put(None)

    def _take_part(self, part: Interruptible) -> None:
        try:
            if self._baton is not None:
                self._baton.enter(self.rank)
            self.result = self._body(self.comm)
            part.end()
        except BaseException as error:
            part.end()
            self.error = part.error() if isinstance(error, Interruption) else error

    def _leave(self) -> None:
        if self.error is None:
            self.leave(FINISHED, "")
        elif not isinstance(self.error, CommTimeoutError):
            # After a wait in vain the others are to find out themselves where they wait.
            self.leave(FAILED, describe_exception(self.error))

    def leave(self, state: int, text: str) -> None:
        """Tell the other ranks, on every communicator, that this one takes part no more."""
        for comm in self.comm._related:
            if comm._closed is None:
                comm._control.leave(state, comm._completed, text)

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread, and for those that push on requests which nobody waits for."""
        self._thread.join(seconds)
        if not self.alive:
            for comm in self.comm._related:
                if self.error is not None:
                    comm._engine.give_up_all(CommunicatorClosedError("the rank has failed"))
                if (progress := comm._engine._progress) is not None:
                    progress.join(SLACK)


def run_threads(
    ranks: Sequence[RankThread],
    patience: float,
    *,
    together: bool = False,
    events: Events | None = None,
) -> None:
    """Run ranks until all have ended, and in the meantime what they ask of this thread.

    What somebody puts into `events` is called here. Once a rank has failed (or, with `together`,
    ended) the others have `patience` seconds to follow; then they are interrupted.
    """
    events = queue.SimpleQueue() if events is None else events
    try:
        for rank in ranks:
            rank.start(events)
        _serve(ranks, events, patience, together=together)
    except BaseException as error:
        for rank in ranks:
            rank.leave(FAILED, describe_exception(error))
        _interrupt(ranks)
        raise
    for rank in ranks:
        if rank.part is not None and rank.part.ended:
            rank.join()


def _serve(ranks: Sequence[RankThread], events: Events, patience: float, *, together: bool) -> None:
    running = len(ranks)
    deadline: float | None = None
    while running:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            event = events.get(timeout=left)
        except queue.Empty:
            _interrupt(ranks)
            return
        if event is not None:
            event()
            continue
        running -= 1
        if deadline is None and (together or any(rank.error is not None for rank in ranks)):
            deadline = time.monotonic() + patience


def _interrupt(ranks: Sequence[RankThread]) -> None:
    """End the ranks that are stuck in Python; give up those that are stuck outside."""
    deadline = time.monotonic() + HOPELESS
    while stuck := [rank for rank in ranks if rank.alive]:
        if time.monotonic() > deadline:
            break
        for rank in stuck:
            if rank.part is not None:
                rank.part.interrupt()
        stuck[0].join(AGAIN)
    for rank in stuck:
        if rank.part is not None:
            rank.error = rank.part.hopeless()
