"""Reductions of arrays of any dtype and framework, on the host or on CUDA devices, beside what else there is.

arraycomm run -n 2 -m docs.studies.benchmarks.arrays --dtypes float32,bfloat16 --frameworks numpy,torch,jax
arraycomm run -n 2 -m docs.studies.benchmarks.arrays bandwidth --device cuda --json figures.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import arraycomm
from arraycomm._dtypes import BY_NAME, check_reducible
from arraycomm.cli.bench.command import sizes
from arraycomm.cli.bench.rows import latency
from docs.studies.benchmarks import devices, results
from docs.studies.benchmarks.cases import FRAMEWORKS, Case, Field, enter, installed
from docs.studies.benchmarks.results import OTHER, OWN, TITLES, Line, measured
from docs.studies.benchmarks.trees import TREES

SIZES: Final = {
    "latency": (8, 64, 1 << 10, 16 << 10),
    "bandwidth": (64 << 10, 1 << 20, 8 << 20, 64 << 20),
}
# Calls of NumPy arrays of float32, as `arraycomm bench latency` measures them.
CALLS: Final = (8, 64 << 10)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("mode", nargs="?", choices=[*SIZES, "trees", "calls"], help="by default all")
    add("--sizes", type=sizes, help="bytes of the arrays, for example 8,64K,1M")
    add("--dtypes", type=dtypes, default=["float32", "bfloat16"])
    add(
        "--frameworks",
        type=frameworks,
        help=f"any of {','.join(FRAMEWORKS)}; on cuda, of cupy,torch",
    )
    add("--only", type=keys, default=list(TITLES), help=f"contenders: {', '.join(TITLES)}")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--repeats", type=int, default=25)
    add("--seconds", type=float, default=2.0, help="for each array")
    add("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if reason := refusal(arguments):
        parser.error(reason)
    on_device = arguments.device == "cuda"
    comm = arraycomm.init("auto" if on_device else "mpi")
    field = devices.DeviceField(comm) if on_device else Field(comm)
    found = {**results.about(field, sys.argv), **field.about(), "lines": []}
    if comm.rank == 0:
        print(results.heading(found), flush=True)
    for line in _lines(field, arguments):
        if comm.rank == 0:
            print(f"\n{results.as_text(line)}", flush=True)
        found["lines"].append(line)
    field.close()
    if comm.rank == 0 and arguments.json is not None:
        results.write(arguments.json, found)
    return int(results.failed(found))


def refusal(arguments: argparse.Namespace) -> str:
    """Say why this cannot be measured here, and what would help; empty if it can be measured."""
    names = arguments.frameworks or ()
    if arguments.device == "cuda":
        return devices.refusal(names, arguments.mode)
    return "arrays of cupy are on a device; pass --device cuda" if "cupy" in names else ""


def _lines(field: Field, arguments: argparse.Namespace) -> Iterator[Line]:
    """Measure what is asked for, line by line; collective."""
    limits = {"repetitions": arguments.repeats, "seconds": arguments.seconds}
    names = arguments.frameworks or _usual(arguments.device)
    for mode, dtype, shapes, named in _work(arguments):
        case = Case(dtype, shapes, field)
        entries = [
            enter(field, case, key, framework)
            for framework in names
            for key in field.keys(framework, tree=mode == "trees")
            if key in arguments.only
        ]
        yield {**measured(field, mode, dtype, case.nbytes, entries, **limits), **named}
    if arguments.mode in {None, "calls"} and arguments.device == "cpu":
        for nbytes in arguments.sizes or CALLS:
            for row in latency(field, nbytes):
                framework = "torch" if "torch" in row.name else "numpy"
                entries = [
                    results.enter(field, OWN, framework, row.own, partial(row.wrong, field)),
                    results.enter(field, OTHER, framework, row.other, str),
                ]
                line = measured(field, "calls", "float32", nbytes, entries, **limits)
                yield {**line, "call": row.name.rpartition(", ")[0]}


def _usual(place: str) -> list[str]:
    return devices.usual() if place == "cuda" else [n for n in ("numpy", "torch") if installed(n)]


def _work(arguments: argparse.Namespace) -> Iterator[tuple[str, str, Any, dict[str, str]]]:
    """Yield what to measure: the mode, the dtype, the shapes, and the name of a tree."""
    for mode in SIZES:
        for dtype in arguments.dtypes if arguments.mode in {None, mode} else ():
            itemsize = BY_NAME[dtype].dtype.itemsize
            for nbytes in arguments.sizes or SIZES[mode]:
                yield mode, dtype, [(max(1, nbytes // itemsize),)], {}
    if (
        arguments.mode in {None, "trees"}
        and "float32" in arguments.dtypes
        and arguments.device == "cpu"
    ):
        for name, shapes in TREES.items():
            yield "trees", "float32", shapes, {"tree": name}


def dtypes(text: str) -> list[str]:
    """Return the dtypes that a text names."""
    names = _known(text, list(BY_NAME))
    for name in names:
        check_reducible(BY_NAME[name].dtype, "sum")
    return names


def keys(text: str) -> list[str]:
    """Return the contenders that a text names."""
    return _known(text, list(TITLES))


def frameworks(text: str) -> list[str]:
    """Return the frameworks that a text names."""
    names = _known(text, (*FRAMEWORKS, "cupy"))
    missing = [name for name in names if not installed(name)]
    if missing:
        raise argparse.ArgumentTypeError(f"not installed: {', '.join(missing)}")
    return names


def _known(text: str, choices: Sequence[str]) -> list[str]:
    words = [word for word in text.split(",") if word]
    for word in words:
        if word not in choices:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(choices)}")
    return words


if __name__ == "__main__":
    sys.exit(main())
