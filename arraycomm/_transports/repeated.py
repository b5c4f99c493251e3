"""What is under way, and a message to or from one rank that is begun repeatedly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Handle(Protocol):
    """A movement under way, or a step of the control channel."""

    def done(self) -> bool:
        """Make progress with all movements; return whether this one is finished. Never waits."""


class Repeated(Handle, Protocol):
    """Memory that is sent to one rank, or into which a message of one rank comes."""

    def begin(self) -> bool:
        """Begin the message once more, after the one before; return whether it is finished."""

    def free(self, *, finished: bool) -> None:
        """Give back what the transport keeps for it; before the group ends."""


class PlainRepeated:
    """A repeated message of any transport, which `start` begins anew."""

    def __init__(self, start: Callable[[], Handle]) -> None:
        self._start = start

    def begin(self) -> bool:
        self._handle = self._start()
        return self._handle.done()

    def done(self) -> bool:
        return self._handle.done()

    def free(self, *, finished: bool) -> None:
        pass
