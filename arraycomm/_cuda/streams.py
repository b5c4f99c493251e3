"""The order between streams: events that the device waits for, and never the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from arraycomm._arrays.device_memory import DeviceMemory, Event


def order(memory: DeviceMemory, first: Iterable[int], then: Iterable[int]) -> None:
    """Have the streams `then` wait for what was put on the streams `first`."""
    here = memory.stream
    for before in first:
        later = [stream for stream in then if not _same(stream, before)]
        if not later:
            continue
        try:
            event = memory.at(before).record()
        finally:
            memory.at(here)
        for stream in later:
            event.wait_on(stream)


def _same(stream: int, other: int) -> bool:
    """Tell whether two handles are of one stream: 1 is another name of 0, the legacy default."""
    return stream == other or {stream, other} == {0, 1}


class Loans:
    """What the device still uses, and would be used anew if nobody held on to it."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Event, object]] = deque()

    def add(self, event: Event, thing: object) -> None:
        """Hold on to `thing` until the device has come to `mark`."""
        self.sweep()
        self._kept.append((event, thing))

    def sweep(self) -> None:
        """Let go of what the device is done with."""
        with suppress(IndexError):  # another thread sweeps as well
            for _ in range(len(self._kept)):
                event, thing = self._kept.popleft()
                if not event.done():
                    self._kept.append((event, thing))


# Of arrays whose framework shows no stream that could wait.
LOANS: Final = Loans()
