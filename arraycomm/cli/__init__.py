"""The command line: `arraycomm demo`, `arraycomm bench`, `arraycomm overlap`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple


class _Command(NamedTuple):
    """A module with `add_arguments(parser)` and `run(arguments) -> int`, and what it does."""

    module: str
    summary: str


_COMMANDS: Final = {
    "demo": _Command(
        "arraycomm.cli.demo.command",
        "train one model with NumPy, PyTorch and JAX on several ranks, and check the result",
    ),
    "bench": _Command("arraycomm.cli.bench.command", "time collectives"),
    "overlap": _Command("arraycomm.cli.bench.overlap", "time a nonblocking call beside other work"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the program's name; those of this process by default.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="arraycomm", description="Collectives on any array, over MPI."
    )
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for name, (module_name, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        # Import only the requested command: another one may need packages that are not installed.
        if name in argv[:1]:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status
