"""`python -m arraycomm bench`: reductions against mpi4py and gloo, side by side in one job."""

from __future__ import annotations

import argparse
import os
import sys

import arraycomm
from arraycomm._launch import detect
from arraycomm.cli.bench.arguments import add_arguments, command, refusal
from arraycomm.cli.bench.compare import as_table, compared, slower
from arraycomm.cli.bench.contenders import Field
from arraycomm.cli.bench.device import DeviceField
from arraycomm.cli.bench.results import failed, measure_all, show, write
from arraycomm.cli.launch import launch

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark; return 0, or 1 if arraycomm gave a wrong result, none, or one too late."""
    if arguments.compare is not None:
        return _compare(arguments)
    reason = refusal(arguments)
    if reason:
        # Every rank sees what is wrong with the arguments, or with its own machine.
        print(f"bench: {reason}", file=sys.stderr)
        return 1
    if detect(os.environ) is None:
        return launch(arguments.ranks, command(arguments))
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


def _compare(arguments: argparse.Namespace) -> int:
    """Compare runs of the benchmark; return 1 if a call is too slow, or nothing comparable."""
    comparisons = compared(*arguments.compare)
    print(as_table(comparisons))
    if all(comparison.ratio is None for comparison in comparisons):
        print("bench: the runs have measured nothing in common", file=sys.stderr)
        return 1
    limit = arguments.at_most
    late = [] if limit is None else slower(comparisons, limit)
    for comparison in late:
        print(
            f"bench: {', '.join(filter(None, comparison.work))} takes {comparison.ratio:.2f} times "
            f"as long, and may take {limit:g} times",
            file=sys.stderr,
        )
    return int(bool(late))
