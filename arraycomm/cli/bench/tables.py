"""Tables of words and numbers, laid out for a terminal or as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a header; the first column holds names, the others numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def as_text(table: Table) -> str:
    """Lay the table out in columns of equal width."""
    lines = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join([table.title, "", *(_aligned(line, widths) for line in lines)])


def as_markdown(table: Table) -> str:
    """Write the table as Markdown, without its title."""
    rule = ["---", *["---:"] * (len(table.header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [table.header, rule, *table.rows])


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.rjust(width) if column else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "   ".join([first, *rest]).rstrip()


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
