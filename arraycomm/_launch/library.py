"""Which MPI mpi4py loads, found out before that MPI starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from arraycomm._errors import BackendUnavailableError
from arraycomm._launch import Launch
from arraycomm._launch.probe import in_short

OPEN_MPI: Final = "Open MPI"
MPICH: Final = "MPICH"
# Those that are derived from MPICH start ranks in its manner.
_FAMILIES: Final = {
    "Open MPI": OPEN_MPI,
    **dict.fromkeys(("MPICH", "MVAPICH", "MVAPICH2", "Intel MPI", "Cray MPICH"), MPICH),
}
_PROBE: Final = Path(__file__).with_name("probe.py")
_PATIENCE: Final = 60


class Library(NamedTuple):
    """An MPI library: its family, which decides how ranks start, its version, and its file."""

    family: str
    version: str
    path: str


def find_library(environment: Mapping[str, str]) -> Library:
    """Return the MPI that mpi4py loads in this interpreter; another process asks, and starts no MPI.

    Raises
    ------
    BackendUnavailableError
        None can be loaded.
    """
    try:
        asked = subprocess.run(
            [sys.executable, "-P", str(_PROBE)],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PATIENCE,
            env=dict(environment),
        )
        said = json.loads(asked.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = {"error": f"loading it ended its process: {error}"}
    if "error" in said:
        raise BackendUnavailableError(f"this Python loads no MPI ({said['error']})")
    return Library(family_of(said["vendor"]), said["version"], said["path"])


def family_of(vendor: str) -> str:
    """Return the family of a vendor as mpi4py names it; itself if it is not known."""
    return _FAMILIES.get(vendor, vendor)


def refuse_foreign_launcher(launch: Launch | None) -> None:
    """Raise if Open MPI's launcher has started this process, but mpi4py loads another MPI.

    An MPI of the MPICH family ends the process if it starts under Open MPI's launcher. So mpi4py is
    imported without starting it, and then started as its import would have.
    """
    if launch is None or launch.launcher != "Open MPI's mpiexec":
        return
    module = _imported_unstarted()
    if module is None or module.Is_initialized() or module.Is_finalized():
        return
    version = module.Get_library_version()
    if family_of(module.get_vendor()[0]) == MPICH and "pmix" not in version.lower():
        raise BackendUnavailableError(
            f"init: {launch.launcher} started {launch.size} processes, but the MPI that was loaded "
            f"({in_short(version)}) cannot start under it; start the program with: "
            f"arraycomm run -n {launch.size} …, which finds the mpiexec of the MPI that is loaded"
        )
    _start(module)


def _imported_unstarted() -> Any:
    """Return the module of mpi4py, of which MPI has not started; None if the program decides that."""
    import mpi4py

    rc = mpi4py.rc
    if rc.initialize not in (True, "yes") or "MPI4PY_RC_INITIALIZE" in os.environ:
        return None
    initialize, finalize = rc.initialize, rc.finalize
    rc.initialize, rc.finalize = False, True if finalize is None else finalize
    try:
        from mpi4py import MPI
    finally:
        rc.initialize, rc.finalize = initialize, finalize
    return MPI


def _start(module: Any) -> None:
    import mpi4py

    if mpi4py.rc.threads in (True, "yes"):
        module.Init_thread(getattr(module, f"THREAD_{mpi4py.rc.thread_level.upper()}"))
    else:
        module.Init()
