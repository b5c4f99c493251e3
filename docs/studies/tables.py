"""Tables of words and numbers in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a header; the first column holds names, the others numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def as_markdown(table: Table) -> str:
    """Write the table as Markdown, without its title."""
    rule = ["---", *["---:"] * (len(table.header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [table.header, rule, *table.rows])
