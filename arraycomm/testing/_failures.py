"""Which rank's failure to show, and how an exception reaches another rank with its traceback."""

from __future__ import annotations

import io
import pickle
import re
import sys
import traceback
import unittest
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Protocol

from arraycomm._callsite import describe_exception, is_ours
from arraycomm._errors import CommTimeoutError, CommunicatorClosedError, PeerError, chain_of

# The `priority` of a skipped test, and of an error that another rank's failure caused.
_SKIPPED: Final = 2
CAUSED: Final = 3
# Attributes of errors, for reports: the rank that raised it, and whether rank 0's report is the one
# to see.
ON_RANK: Final = "on_rank"
FOUND_BY_RANK_0: Final = "found_by_rank_0"


class Ended(Protocol):
    """A rank that has ended, and its error if it failed."""

    rank: int
    error: BaseException | None

    @property
    def step(self) -> int:
        """The communicator's last step that went well."""


def first_failure(
    ranks: Sequence[Ended], expected: Callable[[BaseException], bool] = lambda error: False
) -> BaseException | None:
    """Return the error that caused the others, or None; its notes say how each rank ended.

    Time does not count, so that the same program shows the same error in every run. An error of the
    rank itself comes first, then a timeout, then an error that is `expected`, then a skipped test,
    then an error that another rank's failure caused. Among these the earlier step counts, then the
    lower rank.
    """
    failed = [rank for rank in ranks if rank.error is not None]
    if not failed:
        return None

    def order(rank: Ended) -> tuple[float, int, int]:
        assert rank.error is not None
        place: float = priority(rank.error)
        return (1.5 if place < _SKIPPED and expected(rank.error) else place), rank.step, rank.rank

    first = min(failed, key=order)
    assert first.error is not None
    first.error.add_note(f"raised on rank {first.rank} of {len(ranks)}")
    vars(first.error)[ON_RANK] = f"[rank {first.rank} of {len(ranks)}]"
    for other in ranks:
        if other is not first:
            first.error.add_note(state_of(other.rank, other.error))
    return first.error


def state_of(rank: int, error: BaseException | None) -> str:
    """Say how a rank ended; if it timed out, also where it waited."""
    if error is None:
        return f"rank {rank} returned"
    text = traceback.format_exception_only(error)[0].rstrip()
    if not isinstance(error, CommTimeoutError):
        return f"rank {rank} raised {in_a_line(text)}"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not is_ours(frame.filename)
    ]
    return f"rank {rank} raised {text}\n{''.join(traceback.format_list(frames))}".rstrip()


def in_a_line(text: str) -> str:
    """Return the first line of an error's text, up to the traceback of another rank in it."""
    return re.split(": Traceback|; its traceback", (text.splitlines() or [""])[0])[0]


def priority(error: BaseException | None) -> int:
    """Return the place of an error among those of several ranks: 0 for one of the rank itself."""
    if any(isinstance(link, (PeerError, CommunicatorClosedError)) for link in chain_of(error)):
        return CAUSED
    return _SKIPPED if is_skip(error) else int(isinstance(error, CommTimeoutError))


def is_skip(error: BaseException | None) -> bool:
    """Return whether an exception skips a test."""
    outcomes = sys.modules.get("_pytest.outcomes")
    kinds = (unittest.SkipTest,) if outcomes is None else (unittest.SkipTest, outcomes.Skipped)
    return isinstance(error, kinds)


def pack(error: BaseException) -> bytes:
    """Return an exception as bytes, with its traceback."""
    for attempt in (error, _replacement(error)):
        stream = io.BytesIO()
        try:
            _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(attempt)
            unpack(stream.getvalue())
        except Exception:
            continue
        return stream.getvalue()
    return pickle.dumps(RankError(describe_exception(error)))


def unpack(data: bytes) -> BaseException:
    """Return the exception that was passed to `pack`, with a traceback of the same lines."""
    error = pickle.loads(data)
    assert isinstance(error, BaseException)
    return error


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        from tblib import pickling_support

        if isinstance(obj, TracebackType):
            return pickling_support.pickle_traceback(obj)
        if isinstance(obj, BaseException):
            return pickling_support.pickle_exception(obj)
        return NotImplemented


class RankError(Exception):
    """Replaces an exception of another rank whose class cannot be pickled."""


def _replacement(error: BaseException) -> BaseException:
    text = f"{type(error).__qualname__}: {error}"
    return RankError(text).with_traceback(error.__traceback__)
