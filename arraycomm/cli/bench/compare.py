"""`arraycomm bench --compare BEFORE AFTER`: the times of arraycomm's own calls in two runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from arraycomm.cli.bench.contenders import REFERENCES
from arraycomm.cli.bench.tables import Table, as_text, number_text, ratio_text, size_text

# What is measured: the work, the framework, and how arraycomm does it.
Work = tuple[str, str, str]


class Comparison(NamedTuple):
    """The seconds of one piece of work in either run; None if only the other one has it."""

    work: Work
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """How many times as long it takes after; None without both."""
        if self.before is None or self.after is None:
            return None
        return self.after / self.before


def compared(before: Sequence[Path], after: Sequence[Path]) -> list[Comparison]:
    """Compare two runs, each of one or more files: the median of the files' medians counts."""
    old, new = (_seconds(paths) for paths in (before, after))
    return [Comparison(work, old.get(work), new.get(work)) for work in {**old, **new}]


def as_table(comparisons: Sequence[Comparison]) -> str:
    """Lay comparisons out as a table."""
    rows = [
        (", ".join(filter(None, found.work)), *map(_microseconds, found[1:]), _ratio(found.ratio))
        for found in comparisons
    ]
    return as_text(Table("µs per call", ("", "before", "after", "after ÷ before"), rows))


def slower(comparisons: Sequence[Comparison], limit: float) -> list[Comparison]:
    """Return what takes more than so many times as long, the worst first."""
    found = [comparison for comparison in comparisons if (comparison.ratio or 0.0) > limit]
    return sorted(found, key=lambda comparison: -(comparison.ratio or 0.0))


def _seconds(paths: Sequence[Path]) -> dict[Work, float]:
    """Return the median of each piece of work."""
    found: dict[Work, list[float]] = {}
    for path in paths:
        for work, seconds in _medians(json.loads(path.read_text(encoding="utf-8"))):
            found.setdefault(work, []).append(seconds)
    return {work: median(all_seconds) for work, all_seconds in found.items()}


def _medians(results: Mapping[str, Any]) -> Iterator[tuple[Work, float]]:
    for line in results["lines"]:
        for entry in line["contenders"]:
            if entry["status"] == "ok" and entry["key"] not in REFERENCES:
                yield (_name(line), entry["framework"], entry["name"]), median(entry["samples"])


def _name(line: Mapping[str, Any]) -> str:
    named = line.get("tree") or line.get("model")
    return f"{line['mode']} {named or size_text(line['nbytes'])} of {line['dtype']}"


def _microseconds(seconds: float | None) -> str:
    return "–" if seconds is None else number_text(1e6 * seconds)


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else ratio_text(ratio)
