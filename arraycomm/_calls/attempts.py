"""What may fail on one rank after the header: all ranks hear of it before they go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from arraycomm._callsite import describe_raise
from arraycomm._errors import name_operation, text_of
from arraycomm._protocol.agreement import UndeliveredError
from arraycomm._protocol.details import Detail, Failure, Nothing, exchange_details
from arraycomm._protocol.group import Group
from arraycomm._protocol.mismatch import peer_error
from arraycomm._transports.base import Steps

# Memory of a size that only the header tells is taken together from this size on. Below, one step
# more would take longer than the data.
LARGE: Final = 1 << 20


def attempt_together(group: Group, operation: str, attempt: Callable[[], Any] | None) -> Steps:
    """Return what `attempt` returns on this rank; raise on all ranks if one of them fails.

    A rank that passes None attempts nothing. The ranks are in step afterwards.
    """
    result, errors = None, list[Exception]()
    local: Detail = Nothing()
    try:
        result = None if attempt is None else attempt()
    except Exception as error:
        name_operation(error, operation)
        local = Failure(text_of(error), describe_raise(error))
        errors.append(error)
    details = yield from exchange_details(group.control, local, Nothing, Failure)
    if errors:
        raise UndeliveredError(errors.pop())
    if any(isinstance(detail, Failure) for detail in details):
        raise peer_error(operation, details)
    return result


def take_together(group: Group, operation: str, nbytes: int, take: Callable[[], Any]) -> Steps:
    """Return what `take` returns, memory on this rank; `nbytes` is the same on all ranks."""
    if nbytes < LARGE or group.size == 1:
        return take()
    return (yield from attempt_together(group, operation, take))
