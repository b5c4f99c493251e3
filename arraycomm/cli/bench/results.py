"""What `arraycomm bench` prints and stores, and the comparison of two runs by what they stored."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from arraycomm.cli.bench.timing import ratio

# What is in the files: 2 since a line has the samples of one call of arraycomm's, and of mpi4py's.
FORMAT: Final = 2
_COLUMNS: Final = "{:40}{:>12}{:>12}{:>8}{:>14}"
HEADING: Final = _COLUMNS.format("", "arraycomm", "mpi4py", "ratio", "bandwidth").rstrip()


def as_text(line: dict[str, Any]) -> str:
    """Lay out one line of the results: medians, their ratio, and perhaps a bandwidth."""
    own, other, nbytes = line["arraycomm"], line["mpi4py"], line["nbytes"]
    bandwidth = f"{number_text(nbytes / median(own) / 1e9)} GB/s" if nbytes else ""
    times = (_time_text(median(samples)) for samples in (own, other))
    columns = _COLUMNS.format(line["name"], *times, ratio_text(ratio(own, other)), bandwidth)
    return columns.rstrip()


def compare(before: Sequence[Path], after: Sequence[Path], limit: float | None) -> int:
    """Print the times of two runs; return 1 if a call is too slow, or nothing comparable.

    If a run has several files, the median of their medians counts.
    """
    try:
        old, new = _seconds(before), _seconds(after)
    except ValueError as error:
        print(f"arraycomm bench: {error}", file=sys.stderr)
        return 1
    print(_COLUMNS.format("", "before", "after", "ratio", "").rstrip())
    ratios = {work: new[work] / old[work] for work in old if work in new}
    for work in {**old, **new}:
        times = (_time_text(run[work]) if work in run else "–" for run in (old, new))
        found = ratio_text(ratios[work]) if work in ratios else "–"
        print(_COLUMNS.format(work, *times, found, "").rstrip())
    if not ratios:
        print("arraycomm bench: the runs have measured nothing in common", file=sys.stderr)
        return 1
    late = [work for work in ratios if limit is not None and ratios[work] > limit]
    for work in sorted(late, key=ratios.__getitem__, reverse=True):
        print(
            f"arraycomm bench: {work} takes {ratios[work]:.2f} times as long, and may take "
            f"{limit:g} times",
            file=sys.stderr,
        )
    return int(bool(late))


def _seconds(paths: Sequence[Path]) -> dict[str, float]:
    """Return the median of each piece of work, by its name."""
    found: dict[str, list[float]] = {}
    for path in paths:
        results = json.loads(path.read_text(encoding="utf-8"))
        if results.get("format") != FORMAT:
            raise ValueError(f"{path} was written by another version; measure again with this one")
        for line in results["lines"]:
            found.setdefault(line["name"], []).append(median(line["arraycomm"]))
    return {work: median(all_seconds) for work, all_seconds in found.items()}


def size_text(nbytes: int) -> str:
    """Return a number of bytes in the largest unit that divides it."""
    for unit, bits in (("GB", 30), ("MB", 20), ("KB", 10)):
        if nbytes and nbytes % (1 << bits) == 0:
            return f"{nbytes >> bits} {unit}"
    return f"{nbytes} B"


def _time_text(seconds: float) -> str:
    scale, unit = (1e6, "µs") if seconds < 1e-3 else (1e3, "ms")
    return f"{number_text(scale * seconds)} {unit}"


def number_text(value: float) -> str:
    """Return a positive number with three significant digits, or all of its integer part."""
    decimals = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{max(0, decimals)}f}"


def ratio_text(value: float) -> str:
    """Return a ratio with two decimals, or with one significant digit if it is tiny."""
    return f"{value:.2f}" if value >= 0.095 else f"{value:.1g}"
