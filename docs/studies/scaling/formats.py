"""Times, rates and counts as the page shows them."""

from __future__ import annotations

from collections.abc import Iterable

from arraycomm.cli.bench.tables import number_text


def time_text(seconds: float) -> str:
    """Return seconds in the largest unit in which they are at least one."""
    unit, scale = next(
        ((u, s) for u, s in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if seconds * s >= 1), ("ns", 1e9)
    )
    return f"{number_text(seconds * scale)} {unit}"


def rate_text(per_byte: float) -> str:
    """Return the bandwidth, if a byte takes so many seconds."""
    return f"{number_text(1e-9 / per_byte)} GB/s" if per_byte > 0 else "not measurable"


def count_text(ranks: int | None) -> str:
    """Return a number of ranks, None if there is none."""
    return "no number of" if ranks is None else f"{ranks:,}"


def listed(numbers: Iterable[int]) -> str:
    """Return numbers as in a sentence."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}"
