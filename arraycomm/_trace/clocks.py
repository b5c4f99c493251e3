"""The differences between the clocks of the ranks.

In a step of the control channel, no rank sees the end before every rank has begun. So each step
bounds the difference of two clocks from both sides, and many steps bound it closely.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Final

from arraycomm._protocol.details import Detail, exchange_details
from arraycomm._protocol.group import Group
from arraycomm._protocol.header import Signature, encode, show
from arraycomm._trace.records import Clock
from arraycomm._transports.base import Handle

_ROUNDS: Final = 8

# On Linux this clock is one and the same for all processes of a machine.
now: Final = perf_counter_ns


@dataclass(frozen=True, slots=True)
class Samples(Detail):
    """The times at which a rank began each step and saw its end, and its name for the trace."""

    begun: list[int]
    seen: list[int]
    run: str


def compare(group: Group, run: str) -> Generator[Handle, None, tuple[Clock, str]]:
    """Return this rank's clock against that of rank 0, and the name of rank 0 for the trace."""
    prefix = encode(Signature("trace", "clock"), -1)
    begun, seen = [], []
    for _ in range(_ROUNDS):
        begun.append(now())
        show(group.control, prefix, None)
        yield group.control
        seen.append(now())
    samples: list[Samples]
    samples = yield from exchange_details(group.control, Samples(begun, seen, run))
    return difference(samples[0], samples[group.rank]), samples[0].run


def difference(first: Samples, own: Samples) -> Clock:
    """Return the clock of a rank against that of rank 0: the middle between the bounds.

    If the clocks may be the same one, they are taken for it.
    """
    least = max(theirs - mine for theirs, mine in zip(first.begun, own.seen, strict=True))
    most = min(theirs - mine for theirs, mine in zip(first.seen, own.begun, strict=True))
    if least <= 0 <= most:
        return Clock(own.seen[-1], 0, max(-least, most))
    return Clock(own.seen[-1], (least + most) // 2, (abs(most - least) + 1) // 2)


def corrected(time: int, clocks: Sequence[Clock]) -> int:
    """Return a time of a rank's clock as rank 0's; the difference is linear between comparisons."""
    if not clocks:
        return time
    first, last = clocks[0], clocks[-1]
    drift = 0.0
    if last.at > first.at:
        drift = (last.offset - first.offset) / (last.at - first.at)
    return time + first.offset + round(drift * (time - first.at))
