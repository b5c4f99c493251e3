"""Rows of words and numbers, laid out for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay rows out in columns: the first holds names, the others numbers."""
    names, *columns = zip(*rows, strict=True)
    laid = [[name.ljust(max(map(len, names))) for name in names]]
    laid += [[text.rjust(max(map(len, column))) for text in column] for column in columns]
    return ["   ".join(row) for row in zip(*laid, strict=True)]


def size_text(nbytes: int) -> str:
    """Return a number of bytes in the largest unit that divides it."""
    for unit, bits in (("GB", 30), ("MB", 20), ("KB", 10)):
        if nbytes and nbytes % (1 << bits) == 0:
            return f"{nbytes >> bits} {unit}"
    return f"{nbytes} B"


def number_text(value: float) -> str:
    """Return a positive number with three significant digits, or all of its integer part."""
    decimals = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{max(0, decimals)}f}"


def ratio_text(value: float) -> str:
    """Return a ratio with two decimals, or with one significant digit if it is tiny."""
    return f"{value:.2f}" if value >= 0.095 else f"{value:.1g}"
