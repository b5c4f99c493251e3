"""`arraycomm bench`: its arguments, and what they ask to measure."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import arraycomm
from arraycomm._launch import detect
from arraycomm.cli.bench import compare, rows
from arraycomm.cli.bench.results import (
    Line,
    about,
    as_text,
    enter,
    failed,
    heading,
    measured,
    write,
)
from arraycomm.cli.bench.timing import Ranks
from arraycomm.cli.launch import launch, positive

_SIZES: Final = {"latency": (8, 64 << 10), "bandwidth": (64 << 10, 1 << 20, 8 << 20, 64 << 20)}
# If sizes are given without a mode, smaller ones are measured for their latency.
_LARGE: Final = 64 << 10
_SUFFIXES: Final = {"K": 10, "M": 20, "G": 30}
# What earlier versions had.
REMOVED: Final = ("--device", "--dtypes", "--frameworks", "--only")


class _Removed(argparse.Action):
    """Refuses an option that is no longer there, and says what to do instead."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(
            f"{self.option_strings[0]} was removed; clone the repository, and run "
            "`arraycomm run -m docs.studies.benchmarks.arrays` there"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add(
        "mode",
        nargs="?",
        choices=[*_SIZES, "trees"],
        help="each call with small arrays, large arrays, or trees; by default all of these",
    )
    add("--sizes", type=sizes, metavar="N,…", help="bytes of the arrays, for example 8,64K,1M")
    add("--repeats", type=positive, metavar="N", default=25, help="samples of each; default 25")
    add("--seconds", type=float, metavar="S", default=2.0, help="for each array; default 2")
    add("--json", type=Path, metavar="FILE", help="write every sample to this file")
    compare.add_arguments(parser)
    add("--ranks", type=positive, default=2, metavar="N", help="without mpiexec; default 2")
    for option in REMOVED:
        add(option, action=_Removed, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark; return 0, or 1 if arraycomm gave a wrong result, none, or one too late."""
    if arguments.compare is not None:
        return compare.run(arguments.compare, arguments.at_most)
    if detect(os.environ) is None:
        return launch(arguments.ranks, arguments.words)
    ranks = Ranks(arraycomm.init("mpi"))
    limits = {"repetitions": arguments.repeats, "seconds": arguments.seconds}
    lines = (line(ranks, row, limits) for row in _rows(ranks, arguments))
    results = report(about(ranks, arguments.words), lines, ranks.rank == 0)
    ranks.close()
    if ranks.rank == 0 and arguments.json is not None:
        write(arguments.json, results)
    return int(failed(results))


def report(described: dict[str, Any], lines: Iterator[Line], is_root: bool) -> dict[str, Any]:
    """Return the results with these lines, each printed as soon as it has been measured."""
    results = {**described, "lines": []}
    if is_root:
        print(heading(results), flush=True)
    for line in lines:
        if is_root:
            print(f"\n{as_text(line)}", flush=True)
        results["lines"].append(line)
    return results


def line(ranks: Ranks, row: rows.Row, limits: dict[str, Any]) -> Line:
    """Measure one row; collective."""
    entries = [
        enter(ranks, key, row.framework, call, partial(row.verify, key))
        for key, call in row.contenders.items()
    ]
    return {**measured(ranks, row, row.mode, entries, **limits), **row.named}


def _rows(ranks: Ranks, arguments: argparse.Namespace) -> Iterator[rows.Row]:
    """Yield what is asked for; collective."""
    mode, nbytes_of_all = arguments.mode, arguments.sizes
    for nbytes in sizes_of("latency", mode, nbytes_of_all):
        yield from rows.latency(ranks, nbytes)
    for nbytes in sizes_of("bandwidth", mode, nbytes_of_all):
        yield rows.bandwidth(ranks, nbytes)
    if mode == "trees" or (mode is None and nbytes_of_all is None):
        for name, shapes in rows.TREES.items():
            yield rows.tree(ranks, name, shapes)


def sizes_of(mode: str, wanted: str | None, sizes: Sequence[int] | None) -> Sequence[int]:
    """Return the sizes that are measured in a mode, if some mode and some sizes are asked for."""
    if wanted not in {None, mode}:
        return ()
    if sizes is None:
        return _SIZES[mode]
    if wanted is None:
        return [nbytes for nbytes in sizes if (nbytes >= _LARGE) == (mode == "bandwidth")]
    return sizes


def sizes(text: str) -> list[int]:
    """Return the numbers of bytes that a text says, such as 8,64K."""
    return [_size(word) for word in text.split(",") if word]


def _size(word: str) -> int:
    shift = _SUFFIXES.get(word[-1].upper(), 0)
    try:
        return positive(word[:-1] if shift else word) << shift
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of bytes") from None
