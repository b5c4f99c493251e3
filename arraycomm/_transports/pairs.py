"""What is under way, and a message to a rank with one from another, both begun repeatedly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


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

    def begin(self) -> None:
        """Begin to receive and to send once more; the messages begun before are finished."""

    def free(self) -> None:
        """Give back what the transport keeps for the messages; before the group ends."""


class PlainPair:
    """A pair of messages of any transport, each of which begins one anew."""

    sent: Handle
    received: Handle

    def __init__(self, recv: Callable[[], Handle], send: Callable[[], Handle]) -> None:
        self._recv, self._send = recv, send

    def begin(self) -> None:
        self.received, self.sent = self._recv(), self._send()

    def free(self) -> None:
        pass
