"""Where the time of a trace went, and who waited for whom, in text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Final

from arraycomm.cli.trace.spans import Span

# Lines of the program that are listed, those that took longest first.
_LINES: Final = 20
# Up to this many ranks, the table has a column for each.
_COLUMNS: Final = 8
_STRAGGLERS: Final = 5
_UNITS: Final = ("B", "kB", "MB", "GB", "TB")
_TITLES: Final = ("line", "operation", "algorithm", "calls", "bytes", "waiting", "transfer")
_WIDTH: Final = 80
# Columns of text; those of numbers are set to the right.
_TEXTS: Final = 3


def report(spans: Sequence[Span], ranks: Sequence[int]) -> list[str]:
    """Return the lines that `arraycomm trace` prints."""
    sections = [
        list(section)
        for section in (_by_line(spans), _matrix(spans, ranks), _stragglers(spans), _absent(spans))
    ]
    return [line for section in sections if section for line in (*section, "")][:-1]


def _by_line(spans: Sequence[Span]) -> Iterator[str]:
    found: defaultdict[tuple[str, str, str], list[Span]] = defaultdict(list)
    for span in spans:
        found[span.line, span.operation, span.algorithm].append(span)
    rows = sorted(found.items(), key=lambda row: -sum(s.end - s.start for s in row[1]))
    table = [
        [
            *(*names, str(len(calls)), _bytes(sum(s.nbytes for s in calls))),
            _seconds(sum(s.waiting for s in calls)),
            _seconds(sum(s.transfer for s in calls)),
        ]
        for names, calls in rows[:_LINES]
    ]
    yield from _set([list(_TITLES), *table])
    if len(rows) > _LINES:
        yield f"and {len(rows) - _LINES} more, in which less time was spent"


def _set(table: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            f"{cell:<{width}}" if number < _TEXTS else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells)


def _waits(spans: Sequence[Span]) -> dict[tuple[int, int], float]:
    """Return for each rank and each other one how long it waited for that."""
    waits: defaultdict[tuple[int, int], float] = defaultdict(float)
    for span in spans:
        if span.last >= 0:
            waits[span.rank, span.last] += span.waiting
    return waits


def _matrix(spans: Sequence[Span], ranks: Sequence[int]) -> Iterator[str]:
    waits = _waits(spans)
    if not waits or len(ranks) > _COLUMNS:
        return
    yield "who waited" + "".join(f"{f'for rank {rank}':>12}" for rank in ranks)
    for rank in ranks:
        cells = [_seconds(waits[rank, r]) if (rank, r) in waits else "–" for r in ranks]
        yield f"{f'rank {rank}':<10}" + "".join(f"{cell:>12}" for cell in cells)


def _stragglers(spans: Sequence[Span]) -> Iterator[str]:
    """Name the ranks that others waited for, and the line at which most of that was."""
    at: defaultdict[int, defaultdict[tuple[str, str], float]]
    at = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span.last >= 0:
            at[span.last][span.line, span.operation] += span.waiting
    ordered = sorted(at.items(), key=lambda item: -sum(item[1].values()))
    for rank, lines in ordered[:_STRAGGLERS]:
        (line, operation), most = max(lines.items(), key=lambda item: item[1])
        yield from _filled(
            f"The other ranks waited {_seconds(sum(lines.values()))} for rank {rank}, "
            f"{_seconds(most)} of it in {operation} at {line}."
        )


def _absent(spans: Sequence[Span]) -> Iterator[str]:
    for span in spans:
        if span.absent:
            ranks = ", ".join(map(str, span.absent))
            yield from _filled(
                f"Rank {span.rank} waited {_seconds(span.waiting)} in {span.operation} at "
                f"{span.line} and raised {span.error}; no such call of rank {ranks} was recorded."
            )


def _filled(text: str) -> list[str]:
    """Return the lines of a sentence, which fit a terminal."""
    return wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _bytes(nbytes: float) -> str:
    for unit in _UNITS[:-1]:
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} {_UNITS[-1]}"
