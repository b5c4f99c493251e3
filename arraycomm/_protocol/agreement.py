"""Agreement: one step shows whether all ranks call the same; if not, they raise together."""

from __future__ import annotations

import enum
from collections.abc import Generator, Sequence

import numpy as np

from arraycomm._callsite import CallSite, call_site
from arraycomm._errors import PeerError, name_operation, text_of
from arraycomm._protocol.details import CallDetail, Detail, Failure, Nothing, exchange_details
from arraycomm._protocol.header import Headers, Signature, Status, call_digest, encode, show
from arraycomm._protocol.mismatch import how_left, mismatch, peer_error
from arraycomm._transports.base import Handle
from arraycomm._transports.control import ControlChannel
from arraycomm._transports.notes import ENDED, GONE

# The call of a rank that takes part in whatever the others call: see `join`.
JOINING = Signature("join")


class UndeliveredError(Exception):
    """The ranks are done with one another, but this one's framework does not take its result."""

    def __init__(self, error: Exception) -> None:
        super().__init__(text_of(error))
        self.error = error

    def name(self, operation: str) -> None:
        """Say in the error which operation raised it."""
        name_operation(self.error, operation)
        named = "operation" in vars(self.error) or str(self).startswith(f"{operation}: ")
        if not named:
            # Of a framework's, a function of the user's, or an object that cannot be unpickled
            # here.
            self.error.add_note(f"raised in {operation}")
            vars(self.error)["operation"] = operation


class _Verdict(enum.Enum):
    """What the headers of one step amount to."""

    AGREED = enum.auto()
    DIFFERENT = enum.auto()
    RAISING = enum.auto()
    LEAVING = enum.auto()


class Agreement(Headers):
    """What all ranks showed, and their details if they had to be asked."""

    __slots__ = ("calls", "mixed")

    def __init__(self, control: ControlChannel) -> None:
        super().__init__(control)
        # What each rank called, if the headers differed in what the ranks may differ in.
        self.calls: list[CallDetail] | None = None
        # Whether some ranks' arrays are on devices, and others' are not.
        self.mixed = False

    def free_words(self) -> list[int]:
        """Return each rank's free word."""
        return [words[0] for words in self.all_words()]

    def all_words(self) -> list[tuple[int, ...]]:
        """Return each rank's words, also if details have taken the place of the headers."""
        if self.calls is not None:
            return [(call.word, *call.further_words) for call in self.calls]
        return [self.raw_words(rank) for rank in range(self.size)]


def agree(
    control: ControlChannel,
    signature: Signature,
    *,
    negotiable: bool = False,
    site: str | CallSite | None = None,
) -> Generator[Handle, None, Agreement]:
    """Wait until every rank has shown its signature, as this one has; return the `Agreement`.

    Raises `PeerError` if another rank is raising, `MismatchError` if signatures differ. If it is
    `negotiable`, trees that differ are returned with their details instead.
    """
    yield control
    agreement = Agreement(control)
    if agreement.agree():
        return agreement
    verdict = _judge(agreement)
    agreement.mixed = len(agreement.device_flags()) > 1
    if verdict is _Verdict.AGREED:
        return agreement
    if verdict is _Verdict.LEAVING:
        control.ended = True
        raise _leaving_error(control, agreement)
    words = agreement.raw_words(control.rank)
    local = CallDetail.of(signature, str(site or call_site()), words, negotiable=negotiable)
    details = yield from exchange_details(control, local, CallDetail, Failure)
    calls = [detail for detail in details if isinstance(detail, CallDetail)]
    if verdict is _Verdict.RAISING or (len(calls) < len(details) and _may_differ(calls)):
        _note_left_together(control, details)
        raise peer_error(signature.operation, details)
    if _may_differ(calls):
        agreement.calls = calls
        return agreement
    control.ended = True
    raise mismatch(details)


def _may_differ(calls: Sequence[CallDetail]) -> bool:
    """Return whether all ranks that call are in one operation, whose trees may differ."""
    return all(call.negotiable for call in calls) and len({c.head for c in active(calls)}) == 1


def active(calls: Sequence[CallDetail]) -> list[CallDetail]:
    """Return the calls of the ranks that do not only join in."""
    return [call for call in calls if call.head != JOINING.head]


def fail_in_step(
    control: ControlChannel, operation: str, error: Exception, traceback: str, together: int = 0
) -> Generator[Handle, None, bool]:
    """Take part in the step of a call whose arguments were wrong, so that the others learn of it.

    `together` is how many blocks of `raise_together` the rank is in, if it leaves one of them.
    Returns whether the ranks are still in step afterwards.
    """
    show(control, encode(Signature(operation), -1, status=Status.RAISING), None)
    yield control
    verdict = _judge(Headers(control))
    in_step = verdict is _Verdict.RAISING
    if verdict is not _Verdict.LEAVING:
        local = Failure(text_of(error), traceback, together)
        details = yield from exchange_details(control, local, CallDetail)
        _note_left_together(control, details)
        in_step = in_step or _may_differ([d for d in details if isinstance(d, CallDetail)])
    control.ended = not in_step
    return in_step


def _judge(headers: Headers) -> _Verdict:
    statuses = headers.statuses()
    if Status.LEAVING in statuses:
        return _Verdict.LEAVING
    calling = [rank for rank, status in enumerate(statuses) if status is Status.CALLING]
    calls = {headers.call_digest(rank) for rank in calling}
    arrays = {headers.array_digest(rank) for rank in calling} - {0}
    live = calls - {call_digest(JOINING)}
    if len(live) > 1 or len(arrays) > 1:
        return _Verdict.DIFFERENT
    if Status.RAISING in statuses:
        return _Verdict.RAISING
    return _Verdict.DIFFERENT if live and live != calls else _Verdict.AGREED


def _note_left_together(control: ControlChannel, details: Sequence[Detail]) -> None:
    left = [d if isinstance(d, Failure) and d.together else Nothing() for d in details]
    depths = [d.together for d in left if isinstance(d, Failure)]
    if depths:
        control.left_together = (control.step, min(depths), left)


# The last step of a group: the ranks tell in it that they leave, and why


def leave_in_step(control: ControlChannel, text: str) -> Generator[Handle, None, None]:
    """Take part in one last step, which tells the others that this rank leaves, and why."""
    data = np.frombuffer(text.encode(errors="replace")[-control.payload :], np.uint8)
    control.ended = True
    show(control, encode(Signature(""), len(data), status=Status.LEAVING), data)
    yield control


def states_in_step(control: ControlChannel) -> dict[int, int]:
    """Return how each rank leaves that does in this step: see `leave_in_step`."""
    headers = Headers(control)
    return {
        rank: GONE if headers.payload_bytes(rank) else ENDED
        for rank, status in enumerate(headers.statuses())
        if status is Status.LEAVING
    }


def _leaving_error(control: ControlChannel, headers: Headers) -> PeerError:
    """Return the error of a rank in whose step another one leaves."""
    rank = headers.statuses().index(Status.LEAVING)
    length = min(max(headers.payload_bytes(rank), 0), control.payload)
    text = headers.payload(rank, length).tobytes().decode(errors="replace")
    how = f"failed: {text}; it" if text else f"{how_left(ENDED)} and"
    return PeerError(f"rank {rank} {how} takes part no more", rank=rank, traceback=text)
