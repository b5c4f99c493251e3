"""What this process can know of its launch: by its environment, and by its ancestors.

places      on which host it is, with which cores, and in which namespaces
library     which MPI mpi4py loads, as `probe.py` finds it without that MPI's beginning

A launch is what started this process as one of several: an MPI launcher, torchrun, or whoever set
variables that number processes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final, NamedTuple

from arraycomm._launch.places import proc_is_own

# The variable with the number of ranks, by launcher. Slurm's srun is not among them: it sets its
# variables even if it starts no MPI program.
_SIZES: Final = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpiexec"),
    ("PMI_SIZE", "an mpiexec of the MPICH family"),
    ("MPI_LOCALNRANKS", "an mpiexec of the MPICH family"),
)


SRUN: Final = "srun"
# The variable with the rank.
RANKS: Final = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


class Launch(NamedTuple):
    """How many ranks the launcher started, 0 if it does not say so, and its name."""

    size: int
    launcher: str


def detect(environment: Mapping[str, str]) -> Launch | None:
    """Return what an MPI launcher has set in the environment, or None if there was none."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "") if "SLURM_PROCID" in environment else ""
    for variable, launcher in _SIZES:
        if (said := environment.get(variable, "")).isdigit():
            by_srun = said == tasks and environment.get("PMI_RANK") == environment["SLURM_PROCID"]
            return Launch(int(said), SRUN if by_srun else launcher)
    if tasks.isdigit():
        return Launch(int(tasks), SRUN)
    if "PMIX_NAMESPACE" in environment and environment.get("PMIX_RANK", "").isdigit():
        return Launch(0, "a launcher of PMIx, such as prterun,")
    return None


# Variables of processes that no MPI launcher has started: where they meet, how many there are, and
# which one this is. Then the last two as torchrun sets them.
ADDRESS: Final = "ARRAYCOMM_COORDINATOR_ADDRESS"
NUMBER: Final = "ARRAYCOMM_NUM_PROCESSES"
RANK: Final = "ARRAYCOMM_PROCESS_ID"
TORCHRUN: Final = ("WORLD_SIZE", "RANK")


def by_torchrun(environment: Mapping[str, str]) -> bool:
    """Return whether the environment is that which torchrun makes."""
    return all(environment.get(name) for name in (*TORCHRUN, "MASTER_ADDR", "MASTER_PORT"))


def has_process_manager(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher has set what an MPI needs to connect its processes."""
    names = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "PMI_FD")
    return any(name in environment for name in names)


def launched(environment: Mapping[str, str]) -> Launch | None:
    """Return what has started this process as one of several, an MPI launcher or not."""
    found = detect(environment)
    pairs = {NUMBER: f"whoever set {NUMBER}", TORCHRUN[0]: "torchrun"}
    if not by_torchrun(environment):
        del pairs[TORCHRUN[0]]
    for variable, starter in pairs.items():
        if found is None and environment.get(variable, "").isdecimal():
            found = Launch(int(environment[variable]), starter)
    return found


# Set by `init`, and inherited by every process that a rank starts: the rank's process, and what
# connects it with its launcher.
_CLAIM: Final = "ARRAYCOMM_RANK_PROCESS"


def claim(environment: MutableMapping[str, str], pid: int) -> None:
    """Let the processes that this one starts know that it is a rank."""
    environment[_CLAIM] = f"{pid} {_connection(environment)}"


def claimed_by(environment: Mapping[str, str], pid: int) -> int:
    """Return the process that is already the rank that the environment describes; 0 for none.

    A process that a rank has started inherits the launcher's variables, but is no rank; it is one
    if a launcher of its own has set them.
    """
    owner, _, connection = environment.get(_CLAIM, "").partition(" ")
    if not owner.isdigit() or int(owner) == pid or launched(environment) is None:
        return 0
    return int(owner) if _connection(environment) in ("", connection) else 0


def _connection(environment: Mapping[str, str]) -> str:
    """Return what connects a rank, and no other process, with its launcher; empty if nothing."""
    if "PMIX_NAMESPACE" in environment:
        return f"{environment['PMIX_NAMESPACE']}.{environment.get('PMIX_RANK', '')}"
    try:
        found = os.fstat(int(environment.get("PMI_FD", "")))
    except (OSError, ValueError):
        return _numbers(environment) if detect(environment) is None else ""
    return f"socket:{found.st_ino}" if stat.S_ISSOCK(found.st_mode) else ""


def _numbers(environment: Mapping[str, str]) -> str:
    names = (ADDRESS, RANK, "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", TORCHRUN[1])
    return "/".join(environment.get(name, "") for name in names)


# The launcher itself: the ancestor that started this process as a rank of a job

# The processes that start ranks on their node, by the names that the kernel cuts to 15 letters.
_LAUNCHERS: Final = frozenset(
    (
        *("prterun", "prted", "orterun", "orted", "mpirun", "mpiexec"),
        *("mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_pr", "slurmstepd"),
    )
)


class Ancestor(NamedTuple):
    """A process that this one descends from: its name, its parent, and when it began.

    The last is empty once it has ended, and nobody has asked for its status.
    """

    pid: int
    name: str
    parent: int
    since: str

    def lives(self) -> bool:
        """Return whether it goes on; its number may go to another one."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        found = _process(self.pid)
        return found is None or found.since == self.since

    def __str__(self) -> str:
        return f"{self.name}, process {self.pid}"


def find_launcher(pid: int) -> Ancestor | None:
    """Return the closest ancestor of a process that is a launcher, which may be itself."""
    while pid > 1 and proc_is_own() and (found := _process(pid)):
        if found.name in _LAUNCHERS:
            return found
        pid = found.parent
    return None


def children_of(pid: int) -> list[int]:
    """Return the processes that another one has started, as far as they can be seen."""
    everyone = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [child for child in everyone if (found := _process(child)) and found.parent == pid]


def _process(pid: int) -> Ancestor | None:
    """Return what can be seen of a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name stands in parentheses, and may itself contain some.
    name, rest = stat[stat.index("(") + 1 :].rsplit(")", 1)
    state, parent, *others = rest.split()
    return Ancestor(pid, name, int(parent), "" if state in "ZX" else others[17])
