"""The mpiexec that belongs to an MPI library, and what it needs to start ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from arraycomm._errors import BackendUnavailableError
from arraycomm._launch.library import MPICH, OPEN_MPI, Library, find_library, is_chosen

_NAMES: Final = ("mpiexec", "mpirun", "mpiexec.openmpi", "mpiexec.mpich", "mpiexec.hydra")
# What the launchers of each family say of themselves.
_SAID: Final = {
    OPEN_MPI: ("Open MPI", "OpenRTE", "PRRTE"),
    MPICH: ("HYDRA", "MPICH", "Intel", "MVAPICH"),
}
# The ranks of a machine without MPI: processes of this node.
PROCESSES: Final = "processes"
_STARTER: Final = Path(__file__).with_name("starter.py")
# What a launcher sets that has started this process as its only rank.
_OF_LAUNCHERS: Final = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCAL")
# Where Open MPI's keeps its files: the first that is set.
_BASES: Final = (
    *("PRTE_MCA_prte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base"),
    *("TMPDIR", "TEMP", "TMP"),
)
# By family, what only launchers of other MPIs set.
_OF_OTHERS: Final = {MPICH: ("PMIX_", "OMPI_COMM_"), OPEN_MPI: ("PMI_", "MPI_LOCAL")}
# How far above the library the directory with its programs may lie: lib/, lib64/openmpi/lib/.
_ABOVE: Final = 3


class Launcher(NamedTuple):
    """A program that starts ranks, and the family of MPI that it belongs to; empty if not known."""

    path: str
    family: str

    def command(self, ranks: int, *, threads: int = 1, fault_tolerant: bool = False) -> list[str]:
        """Return the words that start a command on this many ranks, each with this many threads."""
        if self.family == PROCESSES:
            return [sys.executable, "-I", "-S", self.path, str(ranks)]
        options = []
        if self.family == OPEN_MPI:
            # Without the first, Open MPI starts no more ranks than there are cores; without the
            # second it gives all threads of a rank one core.
            options += ["--oversubscribe"]
            options += ["--bind-to", "none"] if threads > 1 else []
            options += ["--with-ft", "ulfm"] if fault_tolerant else []
        return [self.path, *options, "-n", str(ranks)]

    def environment(self, base: Mapping[str, str], threads: int = 1) -> dict[str, str]:
        """Return the variables with which it starts ranks; those that are set stay."""
        needed = {"OMP_NUM_THREADS": str(threads)}
        if self.family == OPEN_MPI:
            # Without it, as in a cleared environment, it does not start.
            needed["HOME"] = os.path.expanduser("~").replace("~", "/")
        if self.family == OPEN_MPI and os.geteuid() == 0:
            needed |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if self.family == MPICH and base.get("SLURM_JOB_NUM_NODES") == "1":
            # It would start its ranks by srun, which waits for this step to leave its cores.
            needed["HYDRA_BOOTSTRAP"] = "fork"
        # In what another MPI's launcher has started, or PMIx, as a shell of srun, its ranks would
        # take the variables of that one for theirs.
        others = _OF_OTHERS.get(self.family, ())
        base = {name: said for name, said in base.items() if not name.startswith(others)}
        if self.family == PROCESSES:
            base = without_launcher(base)
        return needed | dict(base)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that no MPI launcher has set."""
    return {k: said for k, said in environment.items() if not k.startswith(_OF_LAUNCHERS)}


def find_launcher(environment: Mapping[str, str], *, mpi: bool = True) -> Launcher:
    """Return the launcher of the MPI that mpi4py loads in this interpreter.

    An mpiexec of another MPI would start ranks that do not find one another, or fail. Unless `mpi`
    is needed, processes of this node will do if there is no MPI at all.
    """
    try:
        library = find_library(environment)
    except BackendUnavailableError:
        if mpi or is_chosen(environment) or nodes_of(environment) > 1:
            raise
        return Launcher(str(_STARTER), PROCESSES)
    return launcher_of(library, environment.get("PATH", ""))


def launcher_of(library: Library, path: str) -> Launcher:
    """Return the first launcher of the library's family; see `find_launcher`."""
    found = []
    for program in _programs(library, path):
        launcher = Launcher(program, family_of_program(program))
        if launcher.family == library.family:
            return launcher
        found.append(launcher)
    for launcher in found:
        if not launcher.family:
            return launcher
    others = ", ".join(f"{launcher.path} of {launcher.family}" for launcher in found) or "none"
    raise BackendUnavailableError(
        f"ranks need the mpiexec of the MPI that this Python loads ({library.version}, "
        f"{library.path}); found {others}; put the directory of the right one on the PATH"
    )


def _programs(library: Library, path: str) -> Iterator[str]:
    """Yield programs that may start ranks: beside this Python, beside the library, on the PATH."""
    beside = [Path(sys.executable).parent]
    if library.path:
        beside += [above / "bin" for above in Path(library.path).parents[:_ABOVE]]
    places = dict.fromkeys([*map(str, beside), *filter(None, path.split(os.pathsep))])
    for place in places:
        for name in _NAMES:
            if (program := shutil.which(name, path=place)) is not None:
                yield program


@cache
def family_of_program(program: str) -> str:
    """Return the family of MPI that a launcher says it belongs to; empty if it names none."""
    try:
        asked = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    said = asked.stdout + asked.stderr
    return next((f for f, words in _SAID.items() if any(word in said for word in words)), "")


def remove_files_of(pid: int) -> None:
    """Remove what a launcher of Open MPI has left that was killed.

    It names its files by its process number, and does not start if there are any.
    """
    base = next(filter(None, map(os.environ.get, _BASES)), "/tmp")
    shutil.rmtree(os.path.join(base, f"ompi.{pid}"), ignore_errors=True)


# How many nodes batch systems say that they gave to this job.
_NODES: Final = ("SLURM_JOB_NUM_NODES", "PBS_NUM_NODES", "NHOSTS", "FLUX_JOB_NNODES")
# A file with a line for each rank's host.
_HOSTS: Final = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "OAR_NODEFILE")


def nodes_of(environment: Mapping[str, str]) -> int:
    """Return how many nodes a batch system gave to this job; 1 if there is none that says so."""
    said = [int(value) for name in _NODES if (value := environment.get(name, "")).isdecimal()]
    for name in _HOSTS:
        with suppress(OSError):
            hosts = Path(environment.get(name) or os.devnull).read_text("utf-8").splitlines()
            said.append(len({line.split()[0] for line in hosts if line.split()}))
    return max([1, *said])
