"""What is under way, and a message to one rank with one from another that are begun again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

# For how many lengths messages are kept.
_KEPT: Final = 16


class Handle(Protocol):
    """A movement under way, or a step of the control channel."""

    def done(self) -> bool:
        """Make progress with all movements, and tell whether this one is finished; never waits."""


class Pair(Protocol):
    """Memory that is sent to one rank, and memory for what another rank sends."""

    @property
    def sent(self) -> Handle:
        """The message to a rank that was begun last."""

    @property
    def received(self) -> Handle:
        """The message from a rank that was begun last."""

    @property
    def addresses(self) -> tuple[int, int]:
        """Where the native part finds the receive and the send."""

    def begin(self) -> None:
        """Begin to receive and to send once more; the messages begun before are finished."""

    def free(self) -> None:
        """Give back what the transport keeps for the messages; before the group ends."""


class PlainPair:
    """A pair of messages of any transport, each of which begins one anew."""

    sent: Handle
    received: Handle
    addresses = (0, 0)

    def __init__(self, recv: Callable[[], Handle], send: Callable[[], Handle]) -> None:
        self._recv, self._send = recv, send

    def begin(self) -> None:
        self.received, self.sent = self._recv(), self._send()

    def free(self) -> None:
        pass


class ExchangePairs:
    """Messages between the only two ranks of a group, made once for each length.

    Attributes
    ----------
    nbytes : int
        The most bytes of a message.
    failure : callable
        Returns the exception for an error of the native part.
    """

    def __init__(
        self, nbytes: int, make: Callable[[Any, Any], Pair], failure: Callable[[int], Exception]
    ) -> None:
        self.nbytes, self.failure, self._make = nbytes, failure, make
        self._kept: dict[int, list[Pair]] = {}

    def of(self, rows: Any, rank: int, length: int) -> list[Pair]:
        """Return the messages of so many bytes of each row, which is an array with a row of each rank; always the same rows."""
        if length not in self._kept:
            if len(self._kept) >= _KEPT:
                self.free()
            self._kept[length] = [
                self._make(row[rank, :length], row[1 - rank, :length]) for row in rows
            ]
        return self._kept[length]

    def free(self) -> None:
        """Give back what the transport keeps for messages; none is under way, unless it was given up."""
        for pairs in self._kept.values():
            for pair in pairs:
                pair.free()
        self._kept.clear()
