"""The benchmark's results: how they are measured, shown and written to a file."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final

from arraycomm.cli.bench import device
from arraycomm.cli.bench.arguments import command, host_frameworks, requested_trees, requests
from arraycomm.cli.bench.contenders import REFERENCES, Case, Field, keys_of, make
from arraycomm.cli.bench.lines import Line, enter, measured
from arraycomm.cli.bench.machine import machine, versions
from arraycomm.cli.bench.report import complaints, name_of, tables
from arraycomm.cli.bench.tables import as_text
from arraycomm.cli.bench.trees import TreeCase, keys_of_trees, make_for_tree

FORMAT: Final = 1


def measure_all(field: Field, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the arguments ask for, and return the results; collective."""
    lines = chain(_lines(field, arguments), _tree_lines(field, arguments))
    arrays = requests(arguments.mode, arguments.sizes, arguments.dtypes)
    total = len(arrays) + len(requested_trees(arguments))
    return {
        **about(field, command(arguments)),
        "lines": list(_reported(lines, total, field.rank == 0)),
    }


def _reported(lines: Iterable[Line], total: int, reports: bool) -> Iterator[Line]:
    """Report each line as soon as it is measured, also into a pipe: tables come at the end."""
    begun = time.monotonic()
    for number, line in enumerate(lines, 1):
        if reports:
            seconds = time.monotonic() - begun
            about = f"{name_of(line)} of {line['dtype']}"
            print(
                f"bench: {number} of {total}: {about}, {seconds:.0f} s", file=sys.stderr, flush=True
            )
        yield line


def about(field: Field, words: Sequence[str]) -> dict[str, Any]:
    """Return the results' description of themselves, without their lines."""
    from mpi4py import MPI

    launcher = ["mpiexec", "-n", str(field.size), "python", "-m", "arraycomm"]
    return {
        "format": FORMAT,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [*launcher, *words],
        "ranks": field.size,
        "mpi": " ".join(MPI.Get_library_version().strip("\0").splitlines()[0].split()),
        "machine": machine(),
        "versions": versions(),
        **field.about(),
        "unit": "seconds per call of the slowest rank",
    }


def _lines(field: Field, arguments: argparse.Namespace) -> Iterator[Line]:
    for request in requests(arguments.mode, arguments.sizes, arguments.dtypes):
        case: Case
        if isinstance(field, device.DeviceField):
            case = device.DeviceCase(request.dtype, request.nbytes, field)
            entries = device.enter_all(field, case, arguments.frameworks, arguments.only)
        else:
            case = Case(request.dtype, request.nbytes, field.rank, field.size)
            entries = [
                enter(field, case, key, framework, make)
                for framework in host_frameworks(arguments)
                for key in keys_of(framework, request.nbytes)
                if key in arguments.only
            ]
        yield measured(field, case, request.mode, entries, **_limits(arguments))


def _tree_lines(field: Field, arguments: argparse.Namespace) -> Iterator[Line]:
    for name in requested_trees(arguments):
        case = TreeCase(name, field.rank, field.size)
        entries = [
            enter(field, case, key, framework, make_for_tree)
            for framework in host_frameworks(arguments)
            for key in keys_of_trees(framework)
            if key in arguments.only
        ]
        yield {**measured(field, case, "trees", entries, **_limits(arguments)), "tree": name}


def _limits(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"repetitions": arguments.repeats, "seconds": arguments.seconds}


def show(results: dict[str, Any]) -> None:
    """Print the results as tables."""
    about = results["machine"]
    print(f"{about['processor']}, {about['cores']} cores; {results['mpi']}")
    if "device" in results:
        print("{devices} × {name}; arraycomm: {placement}".format(**results["device"]))
    print("Medians; a ratio below 1 says that arraycomm takes less time.")
    for table in tables(results["lines"], results["ranks"]):
        print(f"\n{as_text(table)}")
    for complaint in complaints(results["lines"]):
        print(f"\n{complaint}")


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the results as JSON, with the samples of a contender on one line."""
    text = json.dumps(results, indent=1)
    text = re.sub(r"\[[\s\d.e,+-]*\]", lambda found: " ".join(found[0].split()), text)
    path.write_text(f"{text}\n", encoding="utf-8")


def failed(results: dict[str, Any]) -> bool:
    """Return whether arraycomm itself gave a wrong result, or none, in any line."""
    entries = [entry for line in results["lines"] for entry in line["contenders"]]
    return any(
        entry["key"] not in REFERENCES and entry["status"] in {"wrong", "error"}
        for entry in entries
    )
