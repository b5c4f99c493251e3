"""What the calls on a communicator have done so far, by operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

Totals = dict[str, list[float]]
_FIELDS: Final = ("calls", "bytes", "copies", "seconds")


class Count(NamedTuple):
    """What a fast path has counted for itself."""

    operation: str
    calls: int
    nbytes: int
    seconds: float
    copies: int = 0


class Statistics:
    """Calls, bytes, copies and seconds of one communicator, and of the duplicates made from it."""

    def __init__(self) -> None:
        self._totals: Totals = {}
        self._duplicates: list[Statistics] = []
        # Returns what the fast paths have counted.
        self.fast_paths: Callable[[], list[Count]] = list

    def count(self, operation: str, nbytes: int = 0, copies: int = 0) -> None:
        """Count a call."""
        numbers = self._totals.get(operation) or self.numbers(operation)
        numbers[0] += 1
        numbers[1] += nbytes
        numbers[2] += copies

    def add_seconds(self, operation: str, seconds: float) -> None:
        """Count the time of a blocking call."""
        self.numbers(operation)[3] += seconds

    def absorb(self, counts: list[Count]) -> None:
        """Count what fast paths have done that are given up now."""
        _add_counts(self._totals, counts)

    def include(self, duplicate: Statistics) -> None:
        """Count a duplicate's calls as well."""
        self._duplicates.append(duplicate)

    def take_over(self, duplicate: Statistics) -> None:
        """Keep the figures of a duplicate that has been freed."""
        if duplicate in self._duplicates:
            self._duplicates.remove(duplicate)
            _add(self._totals, duplicate.totals())

    def totals(self) -> Totals:
        """Return the four figures of each operation."""
        totals = {name: list(numbers) for name, numbers in [*self._totals.items()]}
        _add_counts(totals, self.fast_paths())
        for duplicate in self._duplicates:
            _add(totals, duplicate.totals())
        return totals

    def by_name(self) -> dict[str, dict[str, float]]:
        """Return the figures with their names."""
        return {
            operation: dict(zip(_FIELDS, numbers, strict=True))
            for operation, numbers in self.totals().items()
        }

    def numbers(self, operation: str) -> list[float]:
        return self._totals.setdefault(operation, [0, 0, 0, 0.0])


def _add_counts(totals: Totals, counts: list[Count]) -> None:
    for count in counts:
        _add(totals, {count.operation: [count.calls, count.nbytes, count.copies, count.seconds]})


def _add(totals: Totals, others: Totals) -> None:
    for operation, numbers in others.items():
        own = totals.setdefault(operation, [0, 0, 0, 0.0])
        for place, number in enumerate(numbers):
            own[place] += number
