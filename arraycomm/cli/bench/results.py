"""The benchmark's results: how they are measured, shown and written to a file."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

from arraycomm.cli.bench import adapters, device, jitted, messages, shallow_water
from arraycomm.cli.bench.arguments import (
    command,
    host_frameworks,
    requested_loops,
    requested_messages,
    requested_models,
    requested_programs,
    requested_trees,
    requests,
)
from arraycomm.cli.bench.contenders import REFERENCES, Case, Field, keys_of, make
from arraycomm.cli.bench.lines import Entry, Line, enter, measured
from arraycomm.cli.bench.machine import machine, versions
from arraycomm.cli.bench.picture import draw, pictures
from arraycomm.cli.bench.report import complaints, name_of, tables
from arraycomm.cli.bench.tables import as_text, size_text
from arraycomm.cli.bench.train import KEYS, TrainCase, make_for_training
from arraycomm.cli.bench.trees import TreeCase, keys_of_trees, make_for_tree

FORMAT: Final = 1


def measure_all(field: Field, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the arguments ask for, and return the results; collective."""
    results = _about(field, arguments)
    lines = chain(
        _lines(field, arguments),
        _tree_lines(field, arguments),
        _train_lines(field, arguments),
        _program_lines(field, arguments),
        _loop_lines(field, arguments),
        _message_lines(field, arguments),
    )
    results["lines"] = list(_reported(lines, _how_many(arguments), field.rank == 0))
    return results


def _how_many(arguments: argparse.Namespace) -> int:
    """Return how many lines there are to measure."""
    arrays = requests(arguments.mode, arguments.sizes, arguments.dtypes)
    programs = requested_programs(arguments)
    # A simulation in addition to the arrays.
    in_programs = len(programs) + 1 if programs else 0
    others = (requested_trees, requested_models, requested_loops, requested_messages)
    return len(arrays) + in_programs + sum(len(lines(arguments)) for lines in others)


def _reported(lines: Iterable[Line], total: int, reports: bool) -> Iterator[Line]:
    """Say of each line that it is measured, at once, also into a pipe: the tables come at the end."""
    begun = time.monotonic()
    for number, line in enumerate(lines, 1):
        if reports:
            seconds = time.monotonic() - begun
            about = f"{name_of(line)} of {line['dtype']}"
            print(
                f"bench: {number} of {total}: {about}, {seconds:.0f} s", file=sys.stderr, flush=True
            )
        yield line


def _about(field: Field, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results' description of themselves, without their lines."""
    from mpi4py import MPI

    launcher = ["mpiexec", "-n", str(field.size), "python", "-m", "arraycomm"]
    return {
        "format": FORMAT,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [*launcher, *command(arguments)],
        "ranks": field.size,
        "mpi": " ".join(MPI.Get_library_version().strip("\0").splitlines()[0].split()),
        "machine": machine(),
        "versions": versions(),
        **field.about(),
        "unit": "seconds per call of the slowest rank",
    }


def _lines(field: Field, arguments: argparse.Namespace) -> Iterator[Line]:
    entered: Callable[[str, int], tuple[Case, list[Entry]]]
    if isinstance(field, device.DeviceField):
        entered = partial(device.entered, field, arguments.frameworks, arguments.only)
    else:
        entered = partial(_entered, field, host_frameworks(arguments), arguments.only)
    for request in requests(arguments.mode, arguments.sizes, arguments.dtypes):
        case, entries = entered(request.dtype, request.nbytes)
        yield measured(field, case, request.mode, entries, **_limits(arguments))


def _entered(
    field: Field, frameworks: Sequence[str], only: Sequence[str], dtype: str, nbytes: int
) -> tuple[Case, list[Entry]]:
    """Return an array to sum, and who takes part."""
    case = Case(dtype, nbytes, field.rank, field.size)
    wanted = [(f, key) for f in frameworks for key in keys_of(f, nbytes) if key in only]
    return case, [enter(field, case, key, framework, make) for framework, key in wanted]


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


def _train_lines(field: Field, arguments: argparse.Namespace) -> Iterator[Line]:
    for name in requested_models(arguments):
        case = TrainCase(name, field)
        keys = [key for key in KEYS if key in arguments.only]
        entries = [enter(field, case, key, "torch", make_for_training) for key in keys]
        yield {**measured(field, case, "train", entries, **_limits(arguments)), "model": name}


def _program_lines(field: Field, arguments: argparse.Namespace) -> Iterator[Line]:
    sizes = requested_programs(arguments)
    if not sizes:
        return
    jitted.use_host()
    for nbytes in sizes:
        case = Case("float32", nbytes, field.rank, field.size)
        keys = [key for key in jitted.KEYS if key in arguments.only]
        entries = [enter(field, case, key, "jax", jitted.make_jitted) for key in keys]
        line = measured(field, case, "jax", entries, **_limits(arguments))
        yield {**line, "model": f"allreduce of {size_text(case.nbytes)}"}
    water = shallow_water.WaterCase(field)
    keys = [key for key in shallow_water.KEYS if key in arguments.only]
    entries = [enter(field, water, key, "jax", shallow_water.make_water) for key in keys]
    line = measured(field, water, "jax", entries, **_limits(arguments))
    yield {**line, "model": f"{shallow_water.STEPS} steps of shallow water"}


def _loop_lines(field: Field, arguments: argparse.Namespace) -> Iterator[Line]:
    for name in requested_loops(arguments):
        case = adapters.LoopCase(name, field)
        keys = [key for key in adapters.KEYS if key in arguments.only]
        entries = [enter(field, case, key, "any", adapters.make_loop) for key in keys]
        yield {**measured(field, case, "adapters", entries, **_limits(arguments)), "model": name}


def _message_lines(field: Field, arguments: argparse.Namespace) -> Iterator[Line]:
    for nbytes in requested_messages(arguments):
        case = messages.MessageCase(nbytes, field)
        keys = [key for key in messages.KEYS if key in arguments.only]
        entries = [enter(field, case, key, "numpy", messages.make_message) for key in keys]
        yield measured(field, case, "messages", entries, **_limits(arguments))


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


def show_picture(path: Path, results: dict[str, Any]) -> None:
    """Draw the results, and say where."""
    try:
        draw(results, path)
    except (OSError, ValueError) as error:
        print(f"bench: the picture could not be drawn: {error}", file=sys.stderr)
        return
    light, dark = pictures(path)
    print(f"\nDrawn in {light}, and for dark pages in {dark}.")


def failed(results: dict[str, Any]) -> bool:
    """Tell whether arraycomm itself gave a wrong result, or none, in any line."""
    entries = [entry for line in results["lines"] for entry in line["contenders"]]
    return any(
        entry["key"] not in REFERENCES and entry["status"] in {"wrong", "error"}
        for entry in entries
    )
