"""The line that one rank prints once a call waits long: for whom it waits, and where those are."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from arraycomm._checks import check_seconds
from arraycomm._errors import forgiving
from arraycomm._protocol.header import Headers
from arraycomm._protocol.mismatch import name_ranks, ranks_of
from arraycomm._protocol.waits.deadlock import WaitStatus
from arraycomm._transports.control import ControlChannel

VARIABLE: Final = "ARRAYCOMM_REPORT_AFTER"
DEFAULT: Final = 10.0
# Seconds in which ranks of other nodes say where they are.
_REPLIES: Final = 0.5
# How many different places a line names.
_NAMED: Final = 4


class _Setting:
    """What `init` was told; without that, what the environment says."""

    chosen = False
    seconds: float | None = DEFAULT


def choose(seconds: Any) -> None:
    """Set the seconds of waiting before this process prints the line, None for never; or raise."""
    _Setting.seconds, _Setting.chosen = check_seconds(seconds, "init: report_after"), True


def report_after() -> float | None:
    """Return after how many seconds of waiting this process prints the line; None for never."""
    if not _Setting.chosen:
        said = os.environ.get(VARIABLE, str(DEFAULT))
        # A program that never calls `init` has nobody to tell that the value is wrong.
        with suppress(ValueError):
            choose(None if said.lower() == "none" else float(said))
        _Setting.chosen = True
    return _Setting.seconds


def say(text: str) -> None:
    """Write to stderr, in one piece; nobody may read it any more."""
    with forgiving:
        sys.stderr.write(text)
        sys.stderr.flush()


def last_seen(control: ControlChannel, rank: int) -> tuple[WaitStatus | None, str]:
    """Return what a rank waits in, and the last operation that it was seen in, if any."""
    status = WaitStatus.decode(control.notes.wait_status(rank))
    return status, Headers(control, 1).operation(rank) if control.step > 1 else ""


class StillWaiting:
    """The line of one group on this rank, at most once a wait.

    It is printed by rank 0; if that is missing, by the lowest rank that waits.
    """

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._operation = self._site = ""
        self._asked = self._said = True

    def begin(self, operation: str, site: str) -> None:
        """Take note of a wait that has just become long."""
        self._operation, self._site = operation, site
        self._asked = self._said = False

    def look(self, waited: float, missing: Callable[[], list[int]]) -> None:
        """Print the line if it is time."""
        after = None if self._said else report_after()
        if after is None or waited < after:
            return
        if not self._asked:
            self._asked = True
            self._control.notes.ask_wait_status(missing())
        if self._control.shared or waited > after + _REPLIES:
            self._said = True
            ranks = missing()
            if set(range(self._control.rank)) <= set(ranks):
                self._print(ranks)

    def _print(self, missing: Sequence[int]) -> None:
        where = f"in {self._operation} at {self._site}" if self._site else self._operation
        say(f"arraycomm: still waiting {where} {self._cause(missing)}\n")

    def _cause(self, missing: Sequence[int]) -> str:
        if not missing:
            return "for data: all ranks are in this call"
        places = ranks_of((rank, self._place(rank)) for rank in missing)
        named = [
            f"{name_ranks(ranks)}, which {one if len(ranks) == 1 else several}"
            for (one, several), ranks in list(places.items())[:_NAMED]
        ]
        more = sum(map(len, list(places.values())[_NAMED:]))
        return f"for {'; '.join(named)}{f'; and for {more} more' if more else ''}"

    def _place(self, rank: int) -> tuple[str, str]:
        """Return where a rank is, for one rank and for several."""
        status, last = last_seen(self._control, rank)
        if status is None and last:
            return f"is in its own code since {last}", f"are in their own code since {last}"
        text = str(status or "has made no call of this communicator so far")
        return text, text.replace("is ", "are ", 1).replace("has ", "have ", 1)
