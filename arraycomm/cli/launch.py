"""Start this program again on several ranks, with the MPI launcher of this environment."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from arraycomm._errors import BackendUnavailableError
from arraycomm._jobs.job import Program, run_job
from arraycomm._jobs.launchers import Launcher, find_launcher

NO_LAUNCHER: Final = 127


def launch(ranks: int, arguments: Sequence[str], otherwise: str = "") -> int:
    """Run `python -m arraycomm` with these arguments on `ranks` ranks; return the exit status.

    The first argument is the command, which also begins the message if there is no launcher;
    `otherwise` ends it with what else can be done.
    """
    # The ranks share the cores; threads of the linear algebra would only compete with them.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    launcher = launcher_for(arguments[0], ranks, environment, otherwise)
    if launcher is None:
        return NO_LAUNCHER
    program = Program([sys.executable, "-m", "arraycomm", *arguments])
    return run_job(launcher, ranks, environment, program).status


def launcher_for(
    command: str, ranks: int, environment: Mapping[str, str], otherwise: str = "", mpi: str = ""
) -> Launcher | None:
    """Return the launcher of the MPI that is loaded, or of processes of this node if none can be.

    If `mpi` is needed and not there, say how to get it.
    """
    try:
        return find_launcher(environment, mpi=bool(mpi))
    except BackendUnavailableError as error:
        print(
            f"arraycomm {command}: {ranks} rank{'s need' if ranks > 1 else ' needs'} an MPI and "
            f"its launcher, but {error}; install one with: pip install "
            f"'arraycomm[{mpi or 'mpich'}]'{otherwise}",
            file=sys.stderr,
        )
        return None


def positive(text: str) -> int:
    """Return the positive integer that a text says."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer; got {text!r}")
    return int(text)
