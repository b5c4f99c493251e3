"""The watchdog: raises while a rank waits, if waiting on makes no sense.

Another rank may have left, its process may have died, or it may not come in time. While a rank waits
long, the watchdog reports to the others what it waits in, so that their errors can name it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from arraycomm._callsite import call_site
from arraycomm._errors import CommTimeoutError, PeerError, TransportError
from arraycomm._protocol import clock
from arraycomm._protocol.header import Headers
from arraycomm._transports.base import Transport
from arraycomm._transports.control import FINISHED, ControlChannel, ExitNotice

# Seconds of waiting after which a rank reports it, and the parts of the timeout after which it asks
# the ranks that it cannot see.
_LONG_WAIT: Final = 0.1
_ASK_AT: Final = (0.5, 0.9)
# Seconds in which a message of a rank that has left still arrives.
LAST_MESSAGE: Final = 0.5
# Seconds in which MPI learns of the death of a process after others saw that something is wrong.
_DEATH: Final = 5.0


class Related(Protocol):
    """A group of this rank, as far as the watchdog of another is concerned."""

    @property
    def control(self) -> ControlChannel:
        """The group's control channel."""


class Watchdog:
    """Watches the waits of one group on this rank.

    Attributes
    ----------
    current : tuple of str and str or None
        The operation under way and its call site; no site for a call of the waiting thread.
    related : sequence of Group
        This group and its relatives: a wait is reported on all of their control channels.
    """

    def __init__(self, transport: Transport, name: str, timeout: float | None) -> None:
        self._transport = transport
        self._control = transport.control
        self._name = name
        self._timeout = timeout
        self.current: tuple[str, str | None] = ("", None)
        self.related: Sequence[Related] = ()
        self._reported = False
        self._waiting_in = ""
        # How often the ranks that are missing were asked where they are.
        self._asked = 0
        # When a rank was first seen to have left because another had.
        self._alone_since = 0.0

    def check(self, waited: float) -> None:
        """Raise if a rank has left or died, or if time is up; called during every wait."""
        control = self._control
        left = control.exit_notices()
        gone = [rank for rank, notice in left.items() if notice.step < control.step]
        if gone:
            self._check_left(gone, left)
        if waited > _LONG_WAIT:
            self.check_for_deaths()
        operation, site = self.current
        self.report_or_ask(waited, operation, site, control.missing)
        if self._timeout is not None and waited > self._timeout:
            raise CommTimeoutError(self._timeout_text(waited))

    def _check_left(self, gone: list[int], left: dict[int, ExitNotice]) -> None:
        # A rank that has a traceback of its own, or none because it finished, is the cause; the
        # others followed it. Their notices may come before the step that tells of it.
        causes = [rank for rank in gone if left[rank].text or left[rank].state == FINISHED]
        self._alone_since = self._alone_since or clock.now()
        if not causes:
            self.check_for_deaths()
        patience = _DEATH if self._transport.outlives else LAST_MESSAGE
        if causes or clock.now() > self._alone_since + patience:
            cause = (causes or gone)[0]
            raise self.peer_error(cause, left[cause])

    def _timeout_text(self, waited: float) -> str:
        missing = self._control.missing()
        return (
            f"waited {waited:.1f} s (timeout {self._timeout:g} s) in step {self._control.step} on rank "
            f"{self._control.rank}; "
            + ("; ".join(f"rank {r} is missing: it {self.last_seen(r)}" for r in missing))
            + ("" if missing else "every rank had begun the call, but its data did not come")
        )

    def check_message(self, peer: int, doing: str, site: str, waited: float) -> None:
        """Raise if a message to or from `peer` cannot come any more, or if time is up."""
        notice = self._control.exit_notices().get(peer)
        if notice is not None and waited > LAST_MESSAGE:
            raise self.peer_error(peer, notice)
        if waited > _LONG_WAIT:
            self.check_for_deaths()
        self.report_or_ask(waited, doing, site, lambda: [peer])

    def check_message_timeout(self, peer: int, doing: str, site: str, waited: float) -> None:
        """Raise if time is up for a message."""
        if self._timeout is not None and waited > self._timeout:
            raise CommTimeoutError(
                f"{doing} at {site}: waited {waited:.1f} s (timeout {self._timeout:g} s) on rank "
                f"{self._control.rank}; rank {peer} {self.last_seen(peer)}"
            )

    # Deaths

    def explain_failure(self, error: TransportError) -> None:
        """Raise `PeerError` if MPI's error means that a rank has died, which it may learn late."""
        _raise_revoked(error)
        self.check_for_deaths(_DEATH)

    def check_for_deaths(self, patience: float = 0.0) -> None:
        """Raise if the process of another rank has died, and this one was let live."""
        if not self._transport.outlives:
            return
        deadline = clock.now() + patience
        try:
            while not (dead := self._transport.failed()) and clock.now() < deadline:
                time.sleep(LAST_MESSAGE / 50)
        except TransportError as error:
            _raise_revoked(error)
            raise
        if dead:
            raise PeerError(
                f"rank {dead[0]} has died without a word; it {self.last_seen(dead[0])}. "
                "shrink() makes a communicator of the ranks that live",
                rank=dead[0],
            )

    def peer_error(self, rank: int, notice: ExitNotice) -> PeerError:
        """Return the error that tells how a rank left."""
        how = "has reached the end of its program" if notice.state == FINISHED else "failed"
        return PeerError(
            f"rank {rank} {how} and takes part no more; it {self.last_seen(rank)}"
            + (f"; its traceback:\n{notice.text}" if notice.text else ""),
            rank=rank,
            traceback=notice.text,
        )

    # Reports of waits

    def report_or_ask(
        self, waited: float, operation: str, site: str | None, missing: Callable[[], list[int]]
    ) -> None:
        """In a long wait, report it to the other ranks, and ask those that are missing."""
        if waited < _LONG_WAIT:
            self._asked = 0
            return
        if not self._reported:
            where = site or call_site()
            self._waiting_in = (
                f"in {operation} at {where}, step {self._control.step} of {self._name}"
            )
            self._report(f"is waiting {self._waiting_in}")
            self._reported = True
        for group in self.related:
            group.control.answer_requests()
        timeout = self._timeout
        if timeout is not None and waited > timeout * _ASK_AT[min(self._asked, len(_ASK_AT) - 1)]:
            self._asked += 1
            if self._asked <= len(_ASK_AT):
                self._control.ask_wait_status(missing())

    def withdraw(self) -> None:
        """Take a report back: the wait is over."""
        if self._reported:
            self._replace("")

    def give_up(self, error: BaseException) -> None:
        """Replace a report by what came of the wait: ranks that time out later still read it."""
        if self._reported:
            vain = isinstance(error, CommTimeoutError)
            self._replace(f"has waited in vain {self._waiting_in}" if vain else "")

    def _replace(self, text: str) -> None:
        self._reported = False
        self._report(text)

    def _report(self, text: str) -> None:
        for group in self.related:
            group.control.report_wait(text)

    def last_seen(self, rank: int) -> str:
        """Return what another rank was last seen in, as the end of a sentence."""
        status = self._control.wait_status(rank)
        if status:
            return status
        operation = Headers(self._control, 1).operation(rank) if self._control.step > 1 else ""
        return f"was last seen in {operation}" if operation else "was not seen in any call so far"


def _raise_revoked(error: TransportError) -> None:
    if error.revoked:
        raise PeerError(
            "a rank has died, and another one has called shrink(): call it as well"
        ) from error
