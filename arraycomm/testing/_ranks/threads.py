"""Ranks as threads: how each begins and ends, and how stuck ones are ended."""

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
from arraycomm._transports.notes import FAILED, FINISHED
from arraycomm.testing._internals import (
    announce_exit,
    complete_headers,
    completed_step,
    stop_progress,
    unseen_error,
)
from arraycomm.testing._ranks.interrupt import Interruptible, Interruption
from arraycomm.testing._ranks.schedule import Baton

# Seconds beyond the timeout after which every wait in arraycomm has ended.
SLACK: Final = 0.5
# Seconds after which an interrupted rank must be stuck outside Python, and between two attempts.
HOPELESS: Final = 3.0
RETRY: Final = 0.5

Events = queue.SimpleQueue[Callable[[], Any] | None]


class _Thread(threading.Thread):
    """The thread of a rank: one of this module, not the user's."""

    is_rank = True


class RankThread:
    """One rank's thread, with its result or its error."""

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
        self._thread = _Thread(
            target=context.run, args=(self._run,), name=f"rank {comm.rank}", daemon=True
        )
        self._events: Events | None = None

    @property
    def step(self) -> int:
        """The communicator's last step that went well."""
        return completed_step(self.comm)

    def start(self, events: Events) -> None:
        """Start the thread; it puts None into `events` when the rank has ended."""
        self._events = events
        self._thread.start()

    def _run(self) -> None:
        self.part = part = Interruptible(self.rank, threading.get_ident())
        try:
            self._take_part(part)
            self._announce_end()
        except Interruption:
            # It was begun before the rank ended by itself.
            self._announce_end()
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
            complete_headers(self.comm)
            part.end()
        except BaseException as error:
            part.end()
            self.error = part.error() if isinstance(error, Interruption) else error

    def _announce_end(self) -> None:
        if self.error is None:
            announce_exit(self.comm, FINISHED, "")
        elif not isinstance(self.error, CommTimeoutError):
            # After a timeout, the other ranks are to time out as well, and show where they wait.
            announce_exit(self.comm, FAILED, describe_exception(self.error))

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def join(self, seconds: float | None = None) -> None:
        """Wait for the thread, and for the threads that drive its outstanding requests."""
        self._thread.join(seconds)
        if not self.alive:
            failed = self.error is not None
            error = CommunicatorClosedError("the rank has failed") if failed else None
            stop_progress(self.comm, error, SLACK)
            self.error = self.error or unseen_error(self.comm)


def run_threads(
    ranks: Sequence[RankThread],
    patience: float,
    *,
    together: bool = False,
    events: Events | None = None,
) -> None:
    """Run ranks until all have ended, and call in this thread what they put into `events`.

    Once a rank has failed (or, with `together`, ended) the others have `patience` seconds to end;
    then they are interrupted.
    """
    events = queue.SimpleQueue() if events is None else events
    try:
        for rank in ranks:
            rank.start(events)
        _serve(ranks, events, patience, together=together)
    except BaseException as error:
        for rank in ranks:
            announce_exit(rank.comm, FAILED, describe_exception(error))
        _interrupt(ranks)
        raise
    for rank in ranks:
        if rank.part is not None and rank.part.ended:
            rank.join()


def _serve(ranks: Sequence[RankThread], events: Events, patience: float, *, together: bool) -> None:
    running = len(ranks)
    deadline: float | None = None
    while running:
        try:
            event = events.get(block=deadline is None)
        except queue.Empty:
            if deadline is not None and time.monotonic() > deadline:
                _interrupt(ranks)
                return
            # The timeout of `get` may have no end if this process is held up meanwhile.
            time.sleep(1e-3)
            continue
        if event is not None:
            event()
            continue
        running -= 1
        if deadline is None and (together or any(rank.error is not None for rank in ranks)):
            deadline = time.monotonic() + patience


def _interrupt(ranks: Sequence[RankThread]) -> None:
    """Interrupt the ranks that are stuck in Python; give up those that are stuck outside it."""
    deadline = time.monotonic() + HOPELESS
    while stuck := [rank for rank in ranks if rank.alive]:
        if time.monotonic() > deadline:
            break
        for rank in stuck:
            if rank.part is not None:
                rank.part.interrupt()
        stuck[0].join(RETRY)
    for rank in stuck:
        if rank.part is not None:
            rank.error = rank.part.hopeless()
