"""The watchdog: raises while a rank waits, if waiting on makes no sense.

Another rank may have left, its process may have died, or it may not come in time. While a rank
waits long, the watchdog reports to the others what it waits in, so that their errors can name it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Sequence
from math import inf
from typing import Any, Final, ParamSpec, TypeVar

from arraycomm._callsite import call_site
from arraycomm._checks import check_seconds
from arraycomm._errors import CommTimeoutError, PeerError, TransportError
from arraycomm._protocol.mismatch import how_left
from arraycomm._protocol.waits import clock
from arraycomm._protocol.waits.deadlock import DeadlockWatch, Wait
from arraycomm._protocol.waits.still_waiting import StillWaiting, last_seen
from arraycomm._transports.base import Transport
from arraycomm._transports.notes import ENDED, GAVE_UP, WELL, ExitNotice

P = ParamSpec("P")
T = TypeVar("T")

# Seconds of waiting after which a rank reports it, and the parts of the timeout after which it asks
# the ranks that it cannot see.
_LONG_WAIT: Final = 0.1
_ASK_AT: Final = (0.5, 0.9)
# Seconds in which a message of a rank that has left still arrives.
LAST_MESSAGE: Final = 0.5
# Seconds in which programs end together, and with them the threads that Python does not wait for.
_TOGETHER: Final = 10.0
# Seconds in which a rank that waits beside one that has given up is likely to time out itself.
_OWN_TIMEOUT: Final = 2.0


class Watchdog:
    """Watches the waits of one group on this rank."""

    def __init__(
        self, transport: Transport, name: str, timeout: float | None, deadlocks: DeadlockWatch
    ) -> None:
        self._transport = transport
        self._control = transport.control
        self._name = name
        self._timeout = timeout
        # The timeout of the call under way if it has one of its own, and when the call began.
        self._limit: float | None = None
        self._limited_at = 0.0
        # The operation under way and its call site; no site for a call of the waiting thread.
        self.current: tuple[str, str | None] = ("", None)
        # Tells the other ranks of long waits, and finds those that are in vain.
        self.deadlocks = deadlocks
        self._still_waiting = StillWaiting(transport.control)
        # How often the ranks that are missing were asked where they are.
        self._asked = 0
        # When a rank was first seen to have left because another had.
        self._alone_since = 0.0
        # When ranks for which a daemon thread waits were first seen to have ended.
        self._ended_since = 0.0
        # When a rank was first seen to have given up.
        self._given_up_since = 0.0

    def limited(self, timeout: Any, prepare: Callable[P, T]) -> Callable[P, T]:
        """Return `prepare` of a call that may wait so long, instead of as long as the group's.

        It checks the timeout together with the call's arguments: the other ranks hear if it is
        wrong.
        """

        def limited(*args: P.args, **kwargs: P.kwargs) -> T:
            self._limit, self._limited_at = check_seconds(timeout), clock.now()
            return prepare(*args, **kwargs)

        return limited

    def unlimit(self) -> None:
        """Let calls wait as long as the group's timeout says."""
        self._limit = None

    def check(self, waited: float) -> None:
        """Raise if a rank has left or died, or if time is up; called during every wait."""
        control = self._control
        # A call with a timeout of its own ends by itself.
        wait = Wait(control.missing, *self.current, self._timeout, self._limit is None, None)
        left = control.notes.exit_notices()
        gone = [r for r, n in left.items() if n.step < control.step and n.state != GAVE_UP]
        gone += self._given_up(left, waited)
        if gone and not self._may_end_too(gone, left):
            # A rank that found a deadlock has told so before it left.
            self.deadlocks.look(waited, wait, now=True)
            self._check_left(gone, left)
        if waited > _LONG_WAIT:
            self.check_for_deaths()
        if self._limit is not None:
            # What is waited for first may have begun before this call.
            waited = min(waited, clock.now() - self._limited_at)
            wait = wait._replace(timeout=self._limit)
        self._report_or_ask(waited, wait)
        if wait.timeout is not None and waited > wait.timeout:
            raise CommTimeoutError(self._timeout_text(waited, wait.timeout))

    def _may_end_too(self, gone: Sequence[int], left: dict[int, ExitNotice]) -> bool:
        """Return whether this program may end as well as others have, before it misses a thread."""
        if not threading.current_thread().daemon or any(left[r].state != ENDED for r in gone):
            return False
        self._ended_since = self._ended_since or clock.now()
        return clock.now() < self._ended_since + _TOGETHER

    def _given_up(self, left: dict[int, ExitNotice], waited: float) -> list[int]:
        """Return the ranks that gave up, unless this one may be about to time out beside them."""
        control = self._control
        found = [r for r, n in left.items() if n.state == GAVE_UP and n.step < control.step]
        if found and not self._given_up_since:
            missing = {*control.missing()}
            comes_late = missing and missing <= {*found}
            timeout = self._limit or self._timeout
            has_time = timeout is None or timeout - waited > _OWN_TIMEOUT
            self._given_up_since = clock.now() - (_OWN_TIMEOUT if comes_late or has_time else 0)
        return found if found and clock.now() >= self._given_up_since + _OWN_TIMEOUT else []

    def check_given_up(self) -> None:
        """Raise if the call whose result is about to be returned has failed on another rank."""
        if self._control.given_up():
            left = self._control.notes.exit_notices()
            gone = [rank for rank, notice in left.items() if notice.step < self._control.step]
            cause = (_causes(gone, left) or gone)[0]
            raise self.peer_error(cause, left[cause])

    def check_sender(self, rank: int, nbytes: int) -> None:
        """Raise if a rank has failed that would wait until its message is received.

        It does if the message is long, and may change its memory once it has failed.
        """
        long = nbytes > self._transport.copied
        notice = self._control.notes.exit_notices().get(rank) if long else None
        if notice is not None and notice.state not in WELL:
            raise self.peer_error(rank, notice)

    def _check_left(self, gone: list[int], left: dict[int, ExitNotice]) -> None:
        # Those that have left may have followed one that has died.
        self.check_for_deaths(besides=left)
        # Notices of those that followed the cause may come before its own, which may take a while.
        causes = _causes(gone, left)
        self._alone_since = self._alone_since or clock.now()
        if not causes:
            self.check_for_deaths()
        patience = max(self._transport.death_delay, _OWN_TIMEOUT)
        if causes or clock.now() > self._alone_since + patience:
            cause = (causes or gone)[0]
            raise self.peer_error(cause, left[cause])

    def _timeout_text(self, waited: float, timeout: float) -> str:
        there = self._control.withdrawing()
        missing = [r for r in self._control.missing() if r not in there]
        return (
            f"waited {waited:.1f} s (timeout {timeout:g} s) in step {self._control.step} on rank "
            f"{self._control.rank}; "
            + ("; ".join(f"rank {r} is missing: it {self.last_seen(r)}" for r in missing))
            + ("" if missing else "every rank had begun the call, but its data did not come")
        )

    def check_message(self, wait: Wait, waited: float) -> None:
        """Raise if all have left to or from one of which a message is to go."""
        peers = wait.missing()
        # Of several ranks any one would do.
        certain = wait.certain and len(peers) == 1 and wait.timeout is None
        wait = wait._replace(timeout=wait.timeout or self._timeout, certain=certain)
        left = self._control.notes.exit_notices()
        gone = [peer for peer in peers if peer in left]
        late = waited > LAST_MESSAGE and len(gone) == len(peers)
        if late and not self._may_end_too(gone, left):
            self.deadlocks.look(waited, wait, now=True)
            cause = next((peer for peer in gone if left[peer].text), gone[0])
            raise self.peer_error(cause, left[cause])
        if waited > _LONG_WAIT:
            self.check_for_deaths()
        self._report_or_ask(waited, wait)

    def check_message_timeout(self, wait: Wait, waited: float) -> None:
        """Raise if time is up for a message: the group's, or that of its call."""
        timeout = wait.timeout or self._timeout
        if timeout is not None and waited > timeout:
            seen = "; ".join(f"rank {peer} {self.last_seen(peer)}" for peer in wait.missing())
            raise CommTimeoutError(
                f"{wait.doing} at {wait.site}: waited {waited:.1f} s (timeout {timeout:g} s) on "
                f"rank {self._control.rank}; {seen}"
            )

    # Deaths

    def explain_failure(self, error: TransportError) -> None:
        """Raise `PeerError` if an error of the transport is a rank's death; wait to learn of it."""
        _raise_revoked(error)
        self.check_for_deaths(self._transport.death_delay)

    def check_for_deaths(self, patience: float = 0.0, besides: Container[int] = ()) -> None:
        """Raise if another rank's process, none of `besides`, died and this one was let live."""
        deadline = clock.now() + patience
        try:
            while not (dead := [r for r in self._transport.failed() if r not in besides]):
                if clock.now() >= deadline:
                    return
                time.sleep(LAST_MESSAGE / 50)
        except TransportError as error:
            _raise_revoked(error)
            raise
        shrinks = self._transport.shrinks
        raise PeerError(
            f"rank {dead[0]} has died without a word; it {self.last_seen(dead[0])}"
            + (". shrink() makes a communicator of the ranks that live" if shrinks else ""),
            rank=dead[0],
        )

    def peer_error(self, rank: int, notice: ExitNotice) -> PeerError:
        """Return the error that tells how a rank left."""
        return PeerError(
            f"rank {rank} {how_left(notice.state)} and takes part no more; it "
            f"{self.last_seen(rank)}" + (f"; its traceback:\n{notice.text}" if notice.text else ""),
            rank=rank,
            traceback=notice.text,
        )

    # Reports of waits

    def _report_or_ask(self, waited: float, wait: Wait) -> None:
        """In a long wait, report it to the other ranks, and ask those that are missing."""
        if waited < _LONG_WAIT:
            self._asked = 0
            return
        deadlocks = self.deadlocks
        if deadlocks.status is None:
            doing, where = wait.doing, wait.site or call_site()
            deadlocks.begin(f"in {doing} at {where}, step {self._control.step} of {self._name}")
            self._still_waiting.begin(doing, where)
        for group in deadlocks.reports.groups:
            group.control.notes.answer_requests()
        deadlocks.look(waited, wait)
        if deadlocks.blocked:
            self._still_waiting.look(waited, wait.missing)
        if self._asked < len(_ASK_AT) and waited > (wait.timeout or inf) * _ASK_AT[self._asked]:
            self._asked += 1
            self._control.notes.ask_wait_status(wait.missing())

    def withdraw(self) -> None:
        """Take a report back: the wait is over."""
        if self.deadlocks.status is not None:
            self.deadlocks.end(in_vain=False)

    def give_up(self, error: BaseException) -> None:
        """Replace a report by what came of the wait: ranks that time out later still read it."""
        self.deadlocks.end(in_vain=isinstance(error, CommTimeoutError))

    def last_seen(self, rank: int) -> str:
        """Return what another rank was last seen in, as the end of a sentence."""
        status, operation = last_seen(self._control, rank)
        if status is not None:
            return str(status)
        return f"was last seen in {operation}" if operation else "was in no collective so far"


def _raise_revoked(error: TransportError) -> None:
    if error.revoked:
        raise PeerError(
            "a rank has died, and another one has called shrink(): call it as well"
        ) from error


def _causes(gone: Sequence[int], left: dict[int, ExitNotice]) -> list[int]:
    """Return the ranks that others followed: they have a traceback of their own, or finished."""
    return [rank for rank in gone if left[rank].text or left[rank].state in WELL]
