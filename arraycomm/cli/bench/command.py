"""`arraycomm bench`: its arguments, and what they ask to measure."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import arraycomm
from arraycomm._launch import detect
from arraycomm._launch.probe import in_short
from arraycomm.cli.bench import rows
from arraycomm.cli.bench.results import FORMAT, HEADING, as_text, compare
from arraycomm.cli.bench.timing import Ranks, measure
from arraycomm.cli.doctor.machine import about_machine, about_place
from arraycomm.cli.launch import launch, positive

_SUFFIXES: Final = {"K": 10, "M": 20, "G": 30}
# What earlier versions had.
REMOVED: Final = ("--device", "--dtypes", "--frameworks", "--only")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add(
        "mode",
        nargs="?",
        choices=["latency", "bandwidth", "trees"],
        help="each call with small arrays, large arrays, or trees; by default all of these",
    )
    add("--sizes", type=sizes, metavar="N,…", help="bytes of the arrays, for example 8,64K,1M")
    add("--repeats", type=positive, metavar="N", default=25, help="samples of each; default 25")
    add("--seconds", type=float, metavar="S", default=2.0, help="for each line; default 2")
    add("--json", type=Path, metavar="FILE", help="write every sample to this file")
    add(
        "--compare",
        nargs=2,
        type=_paths,
        metavar=("BEFORE", "AFTER"),
        help="measure nothing, but compare what --json has written; each may be several files: "
        "a.json,b.json",
    )
    add(
        "--at-most",
        type=float,
        metavar="R",
        help="with --compare: fail if anything takes more than R times as long after",
    )
    add("--ranks", type=positive, default=2, metavar="N", help="without mpiexec; default 2")
    for option in REMOVED:
        add(option, type=partial(_refuse, option), help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark; return 0, or 1 if arraycomm gave a wrong result, or one too late."""
    if arguments.compare is not None:
        before, after = arguments.compare
        return compare(before, after, arguments.at_most)
    if detect(os.environ) is None:
        return launch(arguments.ranks, arguments.words)
    ranks = Ranks(arraycomm.init("mpi"))
    is_root = ranks.rank == 0
    results = about(ranks, arguments.words)
    if is_root:
        cores = len(results["machine"]["cores"])
        print(f"{results['mpi']}; {cores} cores; ranks: {ranks.size}\n\n{HEADING}")
    limits = {"repetitions": arguments.repeats, "seconds": arguments.seconds}
    for row in asked(ranks, arguments.mode, arguments.sizes):
        if reason := row.wrong(ranks):
            if is_root:
                print(f"arraycomm bench: {row.name}: {reason}", file=sys.stderr)
            return 1
        own, other = measure((row.own, row.other), ranks=ranks, **limits)
        line = {"name": row.name, "nbytes": row.nbytes, "arraycomm": own, "mpi4py": other}
        if is_root:
            print(as_text(line), flush=True)
        results["lines"].append(line)
    ranks.close()
    if is_root and arguments.json is not None:
        arguments.json.write_text(f"{json.dumps(results)}\n", encoding="utf-8")
    return 0


def about(ranks: Ranks, words: Sequence[str]) -> dict[str, Any]:
    """Return the results' description of themselves, and no lines yet."""
    from mpi4py import MPI

    launcher = ["mpiexec", "-n", str(ranks.size), "python", "-m", "arraycomm"]
    return {
        "format": FORMAT,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [*launcher, *words],
        "ranks": ranks.size,
        "mpi": in_short(MPI.Get_library_version()),
        "machine": about_place() | about_machine(),
        "unit": "seconds per call of the slowest rank",
        "lines": [],
    }


def asked(ranks: Ranks, mode: str | None, wanted: Sequence[int] | None) -> Iterator[rows.Row]:
    """Yield the rows of a mode, or of all modes; collective."""
    if mode in {None, "latency"}:
        for nbytes in wanted or (8, 64 << 10):
            yield from rows.latency(ranks, nbytes)
    if mode in {None, "bandwidth"}:
        for nbytes in wanted or (64 << 10, 1 << 20, 8 << 20, 64 << 20):
            yield from rows.bandwidth(ranks, nbytes)
    if mode in {None, "trees"}:
        for name, shapes in rows.TREES.items():
            yield from rows.tree(ranks, name, shapes)


def _refuse(option: str, _: str) -> None:
    raise argparse.ArgumentTypeError(
        f"{option} was removed; clone the repository, and run "
        "`arraycomm run -m docs.studies.benchmarks.arrays` there"
    )


def _paths(text: str) -> list[Path]:
    paths = [Path(word) for word in text.split(",") if word]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        raise argparse.ArgumentTypeError(f"no such file: {', '.join(missing) or text!r}")
    return paths


def sizes(text: str) -> list[int]:
    """Return the numbers of bytes that a text says, such as 8,64K."""
    return [_size(word) for word in text.split(",") if word]


def _size(word: str) -> int:
    shift = _SUFFIXES.get(word[-1].upper(), 0)
    try:
        return positive(word[:-1] if shift else word) << shift
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of bytes") from None
