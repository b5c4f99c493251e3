"""How calls are timed: in samples of many calls, contenders in turn, by the slowest rank."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final

from arraycomm import Communicator

Call = Callable[[], Any]

# Fewer repetitions than this say little about the spread. Even a slow call gets as many.
FEWEST: Final = 5
# Seconds of a sample that a short disturbance hardly changes.
_ENOUGH: Final = 1e-2


class Ranks:
    """The ranks that take part, and a communicator of mpi4py's for them."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.mpi: Any = comm.mpi_comm.Dup()

    def finish(self) -> None:
        """Wait for the work that calls have started; host calls are complete when they return."""

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return, element by element, the largest of all ranks' numbers."""
        rows = self.mpi.allgather(list(seconds))
        return [max(column) for column in zip(*rows, strict=True)]

    def close(self) -> None:
        """Release everything; collective."""
        self.mpi.Free()


def rotated(count: int, repetition: int) -> list[int]:
    """Return the order of contenders in one repetition, by their numbers.

    Each repetition starts with another one, and every second round of them runs backwards: none of
    them always comes first, or always after the same other one.
    """
    rounds, first = divmod(repetition, count)
    order = [*range(first, count), *range(first)]
    return order[::-1] if rounds % 2 else order


def ratio(samples: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of the repetitions' ratios.

    The two samples of one repetition were taken right after one another: what slows the machine for
    a while slows both, and does not change their ratio.
    """
    return statistics.median(a / b for a, b in zip(samples, reference, strict=True))


def measure(
    contenders: Sequence[Call], repetitions: int, seconds: float, ranks: Ranks
) -> list[list[float]]:
    """Time the contenders; collective.

    Return for each contender and repetition the seconds per call of the slowest rank. All
    contenders get about the same part of `seconds`, but at least one call in each sample. If that
    takes longer than `seconds`, there are fewer repetitions, down to `FEWEST`.
    """
    if not contenders:
        return []
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        estimates = [_estimate(call, ranks) for call in contenders]
        share = seconds / (repetitions * len(contenders))
        calls = [max(1, int(share / estimate)) for estimate in estimates]
        once = sum(n * estimate for n, estimate in zip(calls, estimates, strict=True))
        repetitions = min(repetitions, max(FEWEST, int(seconds / once)))
        samples: list[list[float]] = [[] for _ in contenders]
        for repetition in range(repetitions):
            for which in rotated(len(contenders), repetition):
                took = _sample(contenders[which], calls[which], ranks)
                samples[which].append(took / calls[which])
    finally:
        if collects:
            gc.enable()
    return [ranks.slowest(row) for row in samples]


def _sample(call: Call, calls: int, ranks: Ranks) -> float:
    """Return this rank's seconds for that many calls, started together with the other ranks."""
    ranks.mpi.Barrier()
    started = perf_counter()
    for _ in range(calls):
        call()
    ranks.finish()
    return perf_counter() - started


def _estimate(call: Call, ranks: Ranks) -> float:
    """Warm up, and estimate the seconds of one call; the same number on every rank."""
    calls = 1
    _sample(call, calls, ranks)
    while True:
        (took,) = ranks.slowest([_sample(call, calls, ranks)])
        if took >= _ENOUGH:
            return took / calls
        calls *= 4
