"""How a call is timed: in samples of many calls, the contenders in turn, the slowest rank counting."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")

Timed = Callable[[], Any]
Finish = Callable[[], None]

# Fewer repetitions than this say little about the spread; a slow call gets them however long it takes.
FEWEST: Final = 5
# A sample that takes this long hides the cost of reading the clock.
_ENOUGH: Final = 1e-3
# One that takes this long is not disturbed much by anything.
_PLENTY: Final = 1e-2
# More samples behind the estimate of a shorter one.
_LOOKS: Final = 2


class Meeting(Protocol):
    """Where the ranks that are timed meet."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Return, element by element, the largest of all ranks' numbers, on every rank."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many times every contender is sampled, and how many calls each one's sample has."""

    repetitions: int
    calls: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds per call."""

    median: float
    min: float
    max: float


def rotated(contenders: Sequence[T], repetition: int) -> list[T]:
    """Return the order of one repetition: each starts elsewhere, and every second runs backwards.

    So none of them always comes first, or always after the same other one.
    """
    if not contenders:
        return []
    first = repetition % len(contenders)
    order = [*contenders[first:], *contenders[:first]]
    return order[::-1] if repetition % 2 else order


def plan(estimates: Sequence[float], repetitions: int, seconds: float) -> Plan:
    """Divide `seconds` among contenders whose calls take about `estimates` seconds each.

    All get about the same time, but at least one call in each sample. Where that takes longer than
    `seconds`, there are fewer repetitions, down to `FEWEST`.
    """
    if not estimates:
        return Plan(repetitions, ())
    share = seconds / (repetitions * len(estimates))
    calls = tuple(max(1, int(share / estimate)) for estimate in estimates)
    once = sum(n * estimate for n, estimate in zip(calls, estimates, strict=True))
    affordable = max(FEWEST, int(seconds / once))
    return Plan(min(repetitions, affordable), calls)


def figures(samples: Sequence[float]) -> Figures:
    """Return median and extremes of the samples."""
    return Figures(statistics.median(samples), min(samples), max(samples))


def ratio(samples: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median of the repetitions' ratios.

    The two numbers of one repetition were taken right after one another: what slows the machine for
    a while slows both, and leaves their ratio.
    """
    return statistics.median(a / b for a, b in zip(samples, reference, strict=True))


def _nothing() -> None:
    """Calls that are through when they return leave nothing to wait for."""


def measure(
    contenders: Sequence[Timed],
    repetitions: int,
    seconds: float,
    meeting: Meeting,
    finish: Finish = _nothing,
) -> tuple[Plan, list[list[float]]]:
    """Time the contenders; collective. `finish` waits for what their calls have begun.

    Returns
    -------
    plan
        What was done.
    samples
        For each contender and repetition the seconds per call of the slowest rank.
    """
    with no_garbage_collection():
        estimates = [_estimate(call, meeting, finish) for call in contenders]
        agreed = plan(estimates, repetitions, seconds)
        samples = [[0.0] * agreed.repetitions for _ in contenders]
        for repetition in range(agreed.repetitions):
            for which in rotated(range(len(contenders)), repetition):
                calls = agreed.calls[which]
                samples[which][repetition] = (
                    sample(contenders[which], calls, meeting, finish) / calls
                )
    return agreed, [meeting.slowest(row) for row in samples]


def sample(call: Timed, calls: int, meeting: Meeting, finish: Finish = _nothing) -> float:
    """Return the seconds of this rank for so many calls, begun together with the other ranks."""
    meeting.barrier()
    started = perf_counter()
    for _ in range(calls):
        call()
    finish()
    return perf_counter() - started


def _estimate(call: Timed, meeting: Meeting, finish: Finish) -> float:
    """Warm up, and return about how long one call takes; the same number on every rank."""
    calls = 1
    sample(call, calls, meeting, finish)
    while True:
        (took,) = meeting.slowest([sample(call, calls, meeting, finish)])
        if took >= _PLENTY:
            return took / calls
        # The quickest of several: one disturbance here would make every sample too short.
        looks = [sample(call, calls, meeting, finish) for _ in range(_LOOKS)]
        took = min(took, *meeting.slowest(looks))
        if took >= _ENOUGH:
            return took / calls
        calls *= 4


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and not inside the block."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
