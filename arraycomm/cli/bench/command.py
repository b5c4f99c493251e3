"""`arraycomm bench`: its arguments, what they ask to measure, and reductions timed side by side."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import arraycomm
from arraycomm._dtypes import BY_NAME, check_reducible
from arraycomm._launch import detect
from arraycomm.cli.bench import calls, compare, device
from arraycomm.cli.bench.cases import FRAMEWORKS, TITLES, Case, Field, installed
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
from arraycomm.cli.bench.trees import TREES
from arraycomm.cli.launch import launch, positive

_SIZES: Final = {
    "latency": (8, 64, 1 << 10, 16 << 10),
    "bandwidth": (64 << 10, 1 << 20, 8 << 20, 64 << 20),
}
# If sizes are given without a mode, smaller ones are measured for their latency.
_LARGE: Final = 64 << 10
_SUFFIXES: Final = {"K": 10, "M": 20, "G": 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add(
        "mode",
        nargs="?",
        choices=[*_SIZES, "trees"],
        help="small arrays and each call, large arrays, or trees; by default all of these",
    )
    add("--sizes", type=_sizes, metavar="N,…", help="bytes of the arrays, for example 8,64K,1M")
    add("--dtypes", type=_dtypes, metavar="NAME,…", help="default float32,bfloat16")
    add(
        "--frameworks",
        type=_frameworks,
        metavar="NAME,…",
        help=f"any of {','.join(FRAMEWORKS)}; default numpy, and torch if it is installed; with "
        "--device cuda, any of cupy,torch",
    )
    add("--only", type=_keys, metavar="NAME,…", help=f"contenders; default {', '.join(TITLES)}")
    add(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where the arrays are; on cuda the frameworks are cupy and torch; default cpu",
    )
    add("--repeats", type=positive, metavar="N", default=25, help="samples of each; default 25")
    add("--seconds", type=float, metavar="S", default=2.0, help="for each array; default 2")
    add("--json", type=Path, metavar="FILE", help="write every sample to this file")
    compare.add_arguments(parser)
    add("--ranks", type=positive, default=2, metavar="N", help="without mpiexec; default 2")
    parser.set_defaults(dtypes=["float32", "bfloat16"], only=list(TITLES))


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark; return 0, or 1 if arraycomm gave a wrong result, none, or one too late."""
    if arguments.compare is not None:
        return compare.run(arguments.compare, arguments.at_most)
    reason = refusal(arguments)
    if reason:
        # Every rank sees what is wrong with the arguments, or with its own machine.
        print(f"arraycomm bench: {reason}", file=sys.stderr)
        return 1
    if detect(os.environ) is None:
        return launch(arguments.ranks, arguments.words)
    on_device = arguments.device == "cuda"
    comm = arraycomm.init("auto" if on_device else "mpi")
    field = device.DeviceField(comm) if on_device else Field(comm)
    results = {**about(field, arguments.words), "lines": []}
    _say(field, heading(results))
    for line in _lines(field, arguments):
        _say(field, f"\n{as_text(line)}")
        results["lines"].append(line)
    field.close()
    if comm.rank == 0 and arguments.json is not None:
        write(arguments.json, results)
    return int(failed(results))


def refusal(arguments: argparse.Namespace) -> str:
    """Say why this cannot be measured here, and what would help; empty if it can be measured."""
    names = arguments.frameworks or ()
    if arguments.device == "cuda":
        return device.refusal(names, arguments.mode)
    return "arrays of cupy are on a device; pass --device cuda" if "cupy" in names else ""


def _say(field: Field, text: str) -> None:
    if field.rank == 0:
        print(text, flush=True)


def _lines(field: Field, arguments: argparse.Namespace) -> Iterator[Line]:
    """Measure what is asked for, line by line; collective."""
    limits = {"repetitions": arguments.repeats, "seconds": arguments.seconds}
    frameworks = arguments.frameworks or _usual(arguments.device)
    for mode, dtype, shapes, named in _work(arguments):
        case = Case(dtype, shapes, field)
        entries = [
            enter(field, case, key, framework)
            for framework in frameworks
            for key in field.keys(framework, tree=mode == "trees")
            if key in arguments.only
        ]
        yield {**measured(field, case, mode, entries, **limits), **named}
    for row in _rows(field, arguments, frameworks):
        keys = [key for key in (calls.OWN, calls.OTHER) if key in arguments.only]
        entries = [enter(field, row, key, "numpy", row.way(key)) for key in keys]
        yield {**measured(field, row, "calls", entries, **limits), "call": row.name}


def _rows(
    field: Field, arguments: argparse.Namespace, frameworks: Sequence[str]
) -> Iterator[calls.Row]:
    """Yield the calls to measure beside mpi4py's: of NumPy arrays of float32, on the host."""
    small = arguments.mode == "latency" or (arguments.mode is None and arguments.sizes is None)
    if small and "float32" in arguments.dtypes and "numpy" in frameworks:
        for nbytes in calls.SIZES if arguments.sizes is None else arguments.sizes:
            yield from calls.rows(field, nbytes)


def _usual(place: str) -> list[str]:
    return device.usual() if place == "cuda" else [n for n in ("numpy", "torch") if installed(n)]


def _work(arguments: argparse.Namespace) -> Iterator[tuple[str, str, Any, dict[str, str]]]:
    """Yield what to measure: the mode, the dtype, the shapes, and the name of a tree."""
    for mode in _SIZES:
        for dtype in arguments.dtypes:
            itemsize = BY_NAME[dtype].dtype.itemsize
            for nbytes in sizes_of(mode, arguments.mode, arguments.sizes):
                yield mode, dtype, [(max(1, nbytes // itemsize),)], {}
    trees = arguments.mode == "trees" or (arguments.mode is None and arguments.sizes is None)
    if trees and "float32" in arguments.dtypes and arguments.device == "cpu":
        for name, shapes in TREES.items():
            yield "trees", "float32", shapes, {"tree": name}


def sizes_of(mode: str, wanted: str | None, sizes: Sequence[int] | None) -> Sequence[int]:
    """Return the sizes that are measured in a mode, if some mode and some sizes are asked for."""
    if wanted not in {None, mode}:
        return ()
    if sizes is None:
        return _SIZES[mode]
    if wanted is None:
        return [nbytes for nbytes in sizes if (nbytes >= _LARGE) == (mode == "bandwidth")]
    return sizes


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _sizes(text: str) -> list[int]:
    return [_size(word) for word in _words(text)]


def _size(word: str) -> int:
    shift = _SUFFIXES.get(word[-1].upper(), 0)
    try:
        return positive(word[:-1] if shift else word) << shift
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of bytes") from None


def _dtypes(text: str) -> list[str]:
    names = [_known(word, list(BY_NAME)) for word in _words(text)]
    try:
        for name in names:
            check_reducible(BY_NAME[name].dtype, "sum")
    except TypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def _keys(text: str) -> list[str]:
    return [_known(word, list(TITLES)) for word in _words(text)]


def _frameworks(text: str) -> list[str]:
    names = [_known(word, (*FRAMEWORKS, "cupy")) for word in _words(text)]
    missing = [name for name in names if not installed(name)]
    if missing:
        raise argparse.ArgumentTypeError(f"not installed: {', '.join(missing)}")
    return names


def _known(word: str, choices: Sequence[str]) -> str:
    if word not in choices:
        raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(choices)}")
    return word
