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
from arraycomm._launch import SRUN, detect
from arraycomm._launch.probe import in_short

OPEN_MPI: Final = "Open MPI"
MPICH: Final = "MPICH"
# Those that are derived from MPICH start ranks in its manner.
_FAMILIES: Final = {
    "Open MPI": OPEN_MPI,
    **dict.fromkeys(("MPICH", "MVAPICH", "MVAPICH2", "Intel MPI", "Cray MPICH"), MPICH),
}
# What `run --mpi` calls each, and its library.
MPIS: Final = {"mpich": (MPICH, "libmpi.so.12"), "openmpi": (OPEN_MPI, "libmpi.so.40")}
# Variables by which mpi4py is told what to load. With the second one it does not look in this
# Python's own directory.
CHOSEN: Final = "MPI4PY_LIBMPI"
_CHOOSING: Final = (CHOSEN, "MPI4PY_MPIABI")
_PROBE: Final = Path(__file__).with_name("probe.py")
_PATIENCE: Final = 60


class Library(NamedTuple):
    """An MPI library: its family, which decides how ranks start, its version, and its file."""

    family: str
    version: str
    path: str


def is_chosen(environment: Mapping[str, str]) -> bool:
    """Return whether the environment says which MPI to load."""
    return any(environment.get(name) for name in _CHOOSING)


def find_library(environment: Mapping[str, str]) -> Library:
    """Return the MPI that mpi4py loads here, as found by another process, which starts no MPI."""
    found = _probed(environment)
    if isinstance(found, Library):
        return found
    names = [name for name in _CHOOSING if environment.get(name)]
    other = _probed({name: said for name, said in environment.items() if name not in names})
    if names and isinstance(other, Library):
        raise BackendUnavailableError(
            f"this Python loads no MPI ({found}) that {' and '.join(names)} names, which --mpi "
            f"sets; without it, it loads {other.version}, {other.path}"
        )
    raise BackendUnavailableError(f"this Python loads no MPI ({found})")


def path_of(mpi: str) -> str:
    """Return where mpi4py is to look for an MPI: beside this Python, then where the system does."""
    name = MPIS[mpi][1]
    return os.pathsep.join((os.path.join(sys.prefix, "lib", name), name))


def _probed(environment: Mapping[str, str]) -> Library | str:
    """Return the MPI that is loaded in an environment, or why there is none."""
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
        return f"loading it ended its process: {error}"
    if "error" in said:
        return str(said["error"])
    return Library(family_of(said["vendor"]), said["version"], said["path"])


def family_of(vendor: str) -> str:
    """Return the family of a vendor as mpi4py names it; itself if it is not known."""
    return _FAMILIES.get(vendor, vendor)


def refuse_foreign_launcher(module: Any, environment: Mapping[str, str]) -> None:
    """Raise if a launcher of PMIx has started this process, but mpi4py's MPI cannot begin under it.

    `module` is mpi4py's, of which MPI has not begun: one of the MPICH family would end the process.
    """
    launch = detect(environment)
    version = module.Get_library_version()
    under_pmix = "PMIX_NAMESPACE" in environment or "OMPI_COMM_WORLD_SIZE" in environment
    foreign = family_of(module.get_vendor()[0]) == MPICH and "pmix" not in version.lower()
    if launch is None or not under_pmix or not foreign:
        return
    number = f"{launch.size} process{'es' * (launch.size > 1)}" if launch.size else "this process"
    count = launch.size or "…"
    ways = f"arraycomm run -n {count} …, which finds the mpiexec of the MPI that is loaded"
    if launch.launcher == SRUN:
        ways = f"srun --mpi=pmi2 …, or {ways}"
    raise BackendUnavailableError(
        f"init: {launch.launcher} started {number}, but the MPI that was loaded "
        f"({in_short(version)}) cannot start under it; start the program with: {ways}"
    )
