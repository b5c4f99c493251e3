"""Start this program again on several ranks, with the MPI launcher of this environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_NO_LAUNCHER: Final = 127
_INTERRUPTED: Final = 130
_SIGNALLED: Final = 128


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Run `python -m arraycomm` with these arguments on `ranks` ranks; return the exit status.

    The first argument is the command, which also begins the message if there is no launcher.
    """
    launcher = find_launcher()
    if launcher is None:
        print(
            f"{arguments[0]}: {ranks} ranks need an MPI launcher; got no mpiexec beside "
            f"{sys.executable} or on the PATH; install one with: pip install 'arraycomm[mpich]', or run in one process: "
            "--ranks 1",
            file=sys.stderr,
        )
        return _NO_LAUNCHER
    command = [*launcher, "-n", str(ranks), sys.executable, "-m", "arraycomm", *arguments]
    # The ranks share the cores; threads of the linear algebra would only compete with them.
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        # On SIGTERM the launcher ends its ranks; a killed launcher would leave them behind.
        process.terminate()
        process.wait()
        return _INTERRUPTED
    return status if status >= 0 else _SIGNALLED - status


def find_launcher() -> list[str] | None:
    """Return the command that starts ranks, preferably that of this interpreter's environment.

    An `mpiexec` of another MPI than the one that is loaded would start N jobs of one rank.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        return None
    # Without the option, Open MPI starts no more ranks than there are cores.
    return [found, "--oversubscribe"] if _is_open_mpi(found) else [found]


def _is_open_mpi(launcher: str) -> bool:
    version = subprocess.run(
        [launcher, "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    return any(name in version.stdout for name in ("Open MPI", "OpenRTE"))
