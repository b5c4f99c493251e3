"""`arraycomm doctor`: its arguments; alone it examines one process, under a launcher all ranks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import arraycomm
from arraycomm import ArrayCommError, Communicator
from arraycomm._launch import launched
from arraycomm._launch.library import Library
from arraycomm.cli.doctor.advice import advice_for, is_well
from arraycomm.cli.doctor.frameworks import NAMESPACES, about_frameworks
from arraycomm.cli.doctor.machine import about_machine, about_place
from arraycomm.cli.doctor.mpi import about_launcher, about_mpi, about_started_mpi
from arraycomm.cli.doctor.pairs import try_pairs
from arraycomm.cli.doctor.report import as_text
from arraycomm.cli.launch import launch, positive

# Seconds in which a rank is taken for one that does not answer.
_TIMEOUT: Final = 60.0

Findings = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `arraycomm doctor`."""
    add = parser.add_argument
    add("--json", action="store_true", help="print what was found as JSON")
    add("--ranks", type=positive, metavar="N", help="start N ranks, and try every two of them")
    add(
        "--frameworks",
        type=_frameworks,
        default=list(NAMESPACES),
        metavar="NAME,…",
        help=f"which to import; by default all of {','.join(NAMESPACES)}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Examine and print; return 0, or 1 if several ranks could not communicate here."""
    started = launched(os.environ)
    if started is None and arguments.ranks is not None:
        return launch(arguments.ranks, arguments.words)
    if started is None:
        return _show(_examine_alone(arguments.frameworks), arguments.json)
    try:
        comm = arraycomm.init(timeout=_TIMEOUT, report_after=None)
    except (ArrayCommError, ValueError) as error:
        print(f"arraycomm doctor: {error}", file=sys.stderr)
        return 1
    found = _examine_job(comm, started.launcher, arguments.frameworks)
    return 0 if found is None else _show(found, arguments.json)


def _frameworks(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in NAMESPACES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(NAMESPACES)}; got {text!r}")
    return names


def _examine_alone(frameworks: Sequence[str]) -> Findings:
    comm = arraycomm.init("self")
    return {
        "mpi": about_mpi(),
        "started_by": "no launcher; one process",
        "ranks": [about_place()],
        "machine": about_machine(),
        "frameworks": about_frameworks(frameworks, comm, trial=True),
    }


def _examine_job(comm: Communicator, launcher: str, frameworks: Sequence[str]) -> Findings | None:
    """Return what rank 0 has found; None on the other ranks."""
    places = comm.gather_object(about_place())
    pairs = try_pairs(comm)
    if comm.rank != 0:
        return None
    return {
        "mpi": _about_used_mpi() if comm.backend == "mpi" else about_mpi(),
        "started_by": launcher,
        "backend": comm.backend,
        "ranks": places,
        "machine": about_machine(),
        "frameworks": about_frameworks(frameworks, comm, trial=False),
        "pairs": pairs,
    }


def _about_used_mpi() -> Findings:
    mpi = about_started_mpi()
    return mpi | about_launcher(Library(mpi["family"], mpi["library"], mpi["file"]))


def _show(found: Findings, as_json: bool) -> int:
    found = {"version": arraycomm.__version__, **found, "advice": advice_for(found)}
    found["well"] = is_well(found)
    print(json.dumps(found, indent=1) if as_json else as_text(found))
    return 0 if found["well"] else 1
