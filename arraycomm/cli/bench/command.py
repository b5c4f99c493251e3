"""`python -m arraycomm bench`: reductions against mpi4py and gloo, side by side in one job."""

from __future__ import annotations

import argparse
import os
import sys

import arraycomm
from arraycomm._launch import detect
from arraycomm.cli.bench.arguments import add_arguments, command, refusal
from arraycomm.cli.bench.contenders import Field
from arraycomm.cli.bench.device import DeviceField
from arraycomm.cli.bench.results import failed, measure_all, show, write
from arraycomm.cli.launch import find_launcher, launch

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark; return 0, or 1 if arraycomm gave a wrong result or none."""
    reason = refusal(arguments)
    if reason:
        # Every rank sees what is wrong with the arguments, or with its own machine.
        print(f"bench: {reason}", file=sys.stderr)
        return 1
    if detect(os.environ) is None:
        return _launch(arguments)
    on_device = arguments.device == "cuda"
    comm = arraycomm.init("auto" if on_device else "mpi")
    field = DeviceField(comm) if on_device else Field(comm)
    results = measure_all(field, arguments)
    field.close()
    if comm.rank == 0:
        show(results)
        if arguments.json is not None:
            write(arguments.json, results)
    return int(failed(results))


def _launch(arguments: argparse.Namespace) -> int:
    if find_launcher() is None:
        print(
            "bench: the ranks need an MPI launcher; got no mpiexec beside this Python or on the "
            "PATH; install one with: pip install 'arraycomm[mpich]'",
            file=sys.stderr,
        )
        return 1
    return launch(arguments.ranks, command(arguments))
