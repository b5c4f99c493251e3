"""`arraycomm bench --compare BEFORE AFTER`: the times of arraycomm's own calls in two runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from arraycomm.cli.bench.results import REFERENCES, aligned, name_of, number_text, ratio_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments for a comparison."""
    parser.add_argument(
        "--compare",
        nargs=2,
        type=_paths,
        metavar=("BEFORE", "AFTER"),
        help="measure nothing, but compare what --json has written; each may be several files: "
        "a.json,b.json",
    )
    parser.add_argument(
        "--at-most",
        type=float,
        metavar="R",
        help="with --compare: fail if anything takes more than R times as long after",
    )


def run(runs: Sequence[Sequence[Path]], limit: float | None) -> int:
    """Compare runs of the benchmark; return 1 if a call is too slow, or nothing comparable.

    If a run has several files, the median of their medians counts.
    """
    old, new = map(_seconds, runs)
    ratios = {work: new[work] / old[work] for work in old if work in new}
    rows = [
        (work, *(_micros(run.get(work)) for run in (old, new)), _ratio(ratios.get(work)))
        for work in {**old, **new}
    ]
    print(*aligned([("µs per call", "before", "after", "after ÷ before"), *rows]), sep="\n")
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
        for work, seconds in _medians(json.loads(path.read_text(encoding="utf-8"))):
            found.setdefault(work, []).append(seconds)
    return {work: median(all_seconds) for work, all_seconds in found.items()}


def _medians(results: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for line in results["lines"]:
        about = f"{line['mode']} {name_of(line)} of {line['dtype']}"
        for entry in line["contenders"]:
            if entry["status"] == "ok" and entry["key"] not in REFERENCES:
                yield f"{about}, {entry['framework']}, {entry['name']}", median(entry["samples"])


def _micros(seconds: float | None) -> str:
    return "–" if seconds is None else number_text(1e6 * seconds)


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else ratio_text(ratio)


def _paths(text: str) -> list[Path]:
    paths = [Path(word) for word in text.split(",") if word]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        raise argparse.ArgumentTypeError(f"no such file: {', '.join(missing) or text!r}")
    return paths
