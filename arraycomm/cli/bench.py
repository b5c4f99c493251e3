"""`python -m arraycomm bench`: reductions against mpi4py and gloo, side by side in one job."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import arraycomm
from arraycomm._launch import detect
from arraycomm.cli import bench_device
from arraycomm.cli.bench_contenders import (
    FRAMEWORKS,
    REFERENCES,
    TITLES,
    Case,
    Field,
    installed,
    keys_of,
    make,
    parse_dtype,
)
from arraycomm.cli.bench_machine import machine, versions
from arraycomm.cli.bench_match import Entry, Line, enter, measured
from arraycomm.cli.bench_report import complaints, tables
from arraycomm.cli.bench_tables import as_text
from arraycomm.cli.bench_trees import TREES, TreeCase, keys_of_trees, make_for_tree
from arraycomm.cli.demo_launch import find_launcher, launch

FORMAT: Final = 1
_SIZES: Final = {
    "latency": (8, 64, 1 << 10, 16 << 10),
    "bandwidth": (64 << 10, 1 << 20, 8 << 20, 64 << 20),
}
_MODES: Final = (*_SIZES, "trees")
# Where sizes are given without a mode: smaller ones are a matter of latency.
_LARGE: Final = 64 << 10
_SUFFIXES: Final = {"K": 10, "M": 20, "G": 30}


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the results, to be measured."""

    mode: str
    dtype: str
    nbytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add = parser.add_argument
    add(
        "mode",
        nargs="?",
        choices=list(_MODES),
        help="small arrays, large ones, or trees of float32; default all",
    )
    add("--sizes", type=_sizes, metavar="N,…", help="bytes of the arrays, for example 8,64K,1M")
    add(
        "--dtypes",
        type=_dtypes,
        metavar="NAME,…",
        default=["float32", "bfloat16"],
        help="default float32,bfloat16",
    )
    add(
        "--frameworks",
        type=_frameworks,
        metavar="NAME,…",
        help=f"of {','.join(FRAMEWORKS)}; default numpy, and torch where it is installed; with "
        "--device cuda of cupy,torch",
    )
    add(
        "--only",
        type=_keys,
        metavar="NAME,…",
        default=list(TITLES),
        help=f"contenders; default {','.join(TITLES)}",
    )
    add(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where the arrays are; on cuda the frameworks are cupy, and torch; default cpu",
    )
    add("--repeats", type=_positive, metavar="N", default=25, help="samples of each; default 25")
    add("--seconds", type=float, metavar="S", default=2.0, help="for each array; default 2")
    add("--json", type=Path, metavar="FILE", help="write every sample there")
    add("--ranks", type=_positive, default=2, metavar="N", help="without mpiexec; default 2")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark; return 0, or 1 where arraycomm gave a wrong result or none."""
    reason = _refusal(arguments)
    if reason:
        # Every rank sees what is wrong with the arguments, or with its own machine.
        print(f"bench: {reason}", file=sys.stderr)
        return 1
    if detect(os.environ) is None:
        return _launch(arguments)
    comm = arraycomm.init("auto" if arguments.device == "cuda" else "mpi")
    field = bench_device.DeviceField(comm) if arguments.device == "cuda" else Field(comm)
    results = _about(field, arguments)
    results["lines"] = [*_lines(field, arguments), *_tree_lines(field, arguments)]
    field.close()
    if comm.rank == 0:
        _show(results)
        if arguments.json is not None:
            _write(arguments.json, results)
    return int(any(_failed(entry) for line in results["lines"] for entry in line["contenders"]))


def _refusal(arguments: argparse.Namespace) -> str:
    """Say why this cannot be measured here, and what would help; empty where it can."""
    names = arguments.frameworks or ()
    if arguments.device == "cuda":
        return bench_device.refusal(names, arguments.mode)
    if "cupy" in names:
        return "arrays of cupy are on a device; pass --device cuda"
    return ""


def _launch(arguments: argparse.Namespace) -> int:
    if find_launcher() is None:
        print(
            "bench: the ranks need an MPI launcher; got no mpiexec beside this Python or on the "
            "PATH; install one with: pip install 'arraycomm[mpich]'",
            file=sys.stderr,
        )
        return 1
    return launch(arguments.ranks, command(arguments))


def command(arguments: argparse.Namespace) -> list[str]:
    """Return the command line that these arguments came from; `--ranks` is the launcher's."""
    words = ["bench", *([arguments.mode] if arguments.mode else [])]
    words += ["--device", "cuda"] if arguments.device == "cuda" else []
    for name in ("sizes", "dtypes", "frameworks", "only"):
        if (values := getattr(arguments, name)) is not None:
            words += [f"--{name}", ",".join(map(str, values))]
    words += ["--repeats", str(arguments.repeats), "--seconds", str(arguments.seconds)]
    return words if arguments.json is None else [*words, "--json", str(arguments.json)]


def requests(mode: str | None, sizes: Sequence[int] | None, dtypes: Sequence[str]) -> list[Request]:
    """Return what to measure: every size of every dtype, small arrays first."""
    by_mode: dict[str, Sequence[int]] = {}
    for name, usual in _SIZES.items():
        if sizes is None:
            by_mode[name] = usual if mode in {None, name} else ()
        elif mode is None:
            by_mode[name] = [n for n in sizes if (n >= _LARGE) == (name == "bandwidth")]
        else:
            by_mode[name] = sizes if mode == name else ()
    return [
        Request(name, dtype, nbytes)
        for name, chosen in by_mode.items()
        for dtype in dtypes
        for nbytes in chosen
    ]


def _lines(field: Field, arguments: argparse.Namespace) -> Iterator[Line]:
    entered: Callable[[str, int], tuple[Case, list[Entry]]]
    if isinstance(field, bench_device.DeviceField):
        entered = partial(bench_device.entered, field, arguments.frameworks, arguments.only)
    else:
        entered = partial(_entered, field, _chosen(arguments), arguments.only)
    for request in requests(arguments.mode, arguments.sizes, arguments.dtypes):
        case, entries = entered(request.dtype, request.nbytes)
        yield measured(
            field,
            case,
            request.mode,
            entries,
            repetitions=arguments.repeats,
            seconds=arguments.seconds,
        )


def _entered(
    field: Field, frameworks: Sequence[str], only: Sequence[str], dtype: str, nbytes: int
) -> tuple[Case, list[Entry]]:
    """Return an array to sum, and who takes part."""
    case = Case(dtype, nbytes, field.rank, field.size)
    wanted = [(f, key) for f in frameworks for key in keys_of(f) if key in only]
    return case, [enter(field, case, key, framework, make) for framework, key in wanted]


def _chosen(arguments: argparse.Namespace) -> list[str]:
    """Return the frameworks whose arrays take part."""
    names: list[str] | None = arguments.frameworks
    return [n for n in ("numpy", "torch") if installed(n)] if names is None else names


def _tree_lines(field: Field, arguments: argparse.Namespace) -> Iterator[Line]:
    """Trees have sizes of their own, and are of float32."""
    wanted = arguments.mode == "trees" or (arguments.mode is None and arguments.sizes is None)
    if not wanted or "float32" not in arguments.dtypes or arguments.device == "cuda":
        return
    for name in TREES:
        case = TreeCase(name, field.rank, field.size)
        entries = [
            enter(field, case, key, framework, make_for_tree)
            for framework in _chosen(arguments)
            for key in keys_of_trees(framework)
            if key in arguments.only
        ]
        limits = {"repetitions": arguments.repeats, "seconds": arguments.seconds}
        line = measured(field, case, "trees", entries, **limits)
        yield {**line, "tree": name}


def _about(field: Field, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what the results say beside their lines."""
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


def _show(results: dict[str, Any]) -> None:
    about = results["machine"]
    print(f"{about['processor']}, {about['cores']} cores; {results['mpi']}")
    if "device" in results:
        print("{devices} × {name}; arraycomm: {way}".format(**results["device"]))
    print("Medians; a ratio below 1 says that arraycomm takes less time.")
    for table in tables(results["lines"], results["ranks"]):
        print(f"\n{as_text(table)}")
    for complaint in complaints(results["lines"]):
        print(f"\n{complaint}")


def _write(path: Path, results: dict[str, Any]) -> None:
    text = json.dumps(results, indent=1)
    # The samples of one contender on one line: a reader of the file, and of its changes, sees more.
    text = re.sub(r"\[[\s\d.e,+-]*\]", lambda found: " ".join(found[0].split()), text)
    path.write_text(f"{text}\n", encoding="utf-8")


def _failed(entry: dict[str, Any]) -> bool:
    """Tell whether arraycomm itself gave a wrong result, or none."""
    return entry["key"] not in REFERENCES and entry["status"] in {"wrong", "error"}


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _sizes(text: str) -> list[int]:
    return [_size(word) for word in _words(text)]


def _size(word: str) -> int:
    shift = _SUFFIXES.get(word[-1].upper(), 0)
    try:
        return _positive(word[:-1] if shift else word) << shift
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of bytes") from None


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _dtypes(text: str) -> list[str]:
    try:
        return [parse_dtype(word) for word in _words(text)]
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
