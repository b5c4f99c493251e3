"""How calls are timed: in samples of many calls, contenders in turn, by the slowest rank."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, TypeVar

from arraycomm import Communicator

T = TypeVar("T")

Timed = Callable[[], Any]

# Fewer repetitions than this say little about the spread. Even a slow call gets as many.
FEWEST: Final = 5
# Seconds of a sample beside which the cost of reading the clock does not count.
_ENOUGH: Final = 1e-3
# Seconds of a sample that a short disturbance hardly changes.
_PLENTY: Final = 1e-2
# Additional samples for the estimate of a shorter one.
_EXTRA_SAMPLES: Final = 2


class Ranks:
    """The ranks that take part, and a communicator of mpi4py's for them."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.mpi: Any = comm.mpi_comm.Dup()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.mpi.Barrier()

    def finish(self) -> None:
        """Wait for the work that calls have started; host calls are complete when they return."""

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return, element by element, the largest of all ranks' numbers."""
        rows = self.mpi.allgather(list(seconds))
        return [max(column) for column in zip(*rows, strict=True)]

    def close(self) -> None:
        """Release everything; collective."""
        self.mpi.Free()


@dataclass(frozen=True, slots=True)
class Plan:
    """How many times each contender is sampled, and how many calls its samples have."""

    repetitions: int
    calls: tuple[int, ...]


def rotated(contenders: Sequence[T], repetition: int) -> list[T]:
    """Return the order of contenders in one repetition.

    Each repetition starts with another one, and every second runs backwards: none of them always
    comes first, or always after the same other one.
    """
    if not contenders:
        return []
    first = repetition % len(contenders)
    order = [*contenders[first:], *contenders[:first]]
    return order[::-1] if repetition % 2 else order


def plan(estimates: Sequence[float], repetitions: int, seconds: float) -> Plan:
    """Divide `seconds` among contenders whose calls take about `estimates` seconds each.

    All get about the same time, but at least one call in each sample. If that takes longer than
    `seconds`, there are fewer repetitions, down to `FEWEST`.
    """
    if not estimates:
        return Plan(repetitions, ())
    share = seconds / (repetitions * len(estimates))
    calls = tuple(max(1, int(share / estimate)) for estimate in estimates)
    once = sum(n * estimate for n, estimate in zip(calls, estimates, strict=True))
    affordable = max(FEWEST, int(seconds / once))
    return Plan(min(repetitions, affordable), calls)


def ratio(samples: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of the repetitions' ratios.

    The two samples of one repetition were taken right after one another: what slows the machine for
    a while slows both, and does not change their ratio.
    """
    return statistics.median(a / b for a, b in zip(samples, reference, strict=True))


def measure(
    contenders: Sequence[Timed], repetitions: int, seconds: float, ranks: Ranks
) -> tuple[Plan, list[list[float]]]:
    """Time the contenders; collective.

    Return the plan that was followed, and for each contender and repetition the seconds per call of
    the slowest rank.
    """
    with no_garbage_collection():
        estimates = [_estimate(call, ranks) for call in contenders]
        agreed = plan(estimates, repetitions, seconds)
        samples = [[0.0] * agreed.repetitions for _ in contenders]
        for repetition in range(agreed.repetitions):
            for which in rotated(range(len(contenders)), repetition):
                calls = agreed.calls[which]
                took = sample(contenders[which], calls, ranks)
                samples[which][repetition] = took / calls
    return agreed, [ranks.slowest(row) for row in samples]


def sample(call: Timed, calls: int, ranks: Ranks) -> float:
    """Return this rank's seconds for that many calls, started together with the other ranks."""
    ranks.barrier()
    started = perf_counter()
    for _ in range(calls):
        call()
    ranks.finish()
    return perf_counter() - started


def _estimate(call: Timed, ranks: Ranks) -> float:
    """Warm up, and estimate the seconds of one call; the same number on every rank."""
    calls = 1
    sample(call, calls, ranks)
    while True:
        (took,) = ranks.slowest([sample(call, calls, ranks)])
        if took >= _PLENTY:
            return took / calls
        # The quickest of several: a disturbance here would make every sample too short.
        extra = [sample(call, calls, ranks) for _ in range(_EXTRA_SAMPLES)]
        took = min(took, *ranks.slowest(extra))
        if took >= _ENOUGH:
            return took / calls
        calls *= 4


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and not during the block."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
