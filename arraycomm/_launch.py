"""What the environment says about how this process was launched."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, MutableMapping
from typing import Final, NamedTuple

# The variable with the number of ranks, by launcher. Slurm's srun is not among them: it sets its
# variables even if it starts no MPI program.
_SIZES: Final = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpiexec"),
    ("PMI_SIZE", "an mpiexec of the MPICH family"),
    ("MPI_LOCALNRANKS", "an mpiexec of the MPICH family"),
)


class Launch(NamedTuple):
    """How many ranks the launcher started, and its name."""

    size: int
    launcher: str


def detect(environment: Mapping[str, str]) -> Launch | None:
    """Return what an MPI launcher has set in the environment, or None if there was none."""
    for variable, launcher in _SIZES:
        if environment.get(variable, "").isdigit():
            return Launch(int(environment[variable]), launcher)
    if "SLURM_PROCID" in environment and environment.get("SLURM_STEP_NUM_TASKS", "").isdigit():
        return Launch(int(environment["SLURM_STEP_NUM_TASKS"]), "srun")
    return None


def torchrun_size(environment: Mapping[str, str]) -> int:
    """Return the number of processes that torchrun started, or 0."""
    if "TORCHELASTIC_RUN_ID" in environment and environment.get("WORLD_SIZE", "").isdigit():
        return int(environment["WORLD_SIZE"])
    return 0


# Set by `init`, and inherited by every process that a rank starts: the rank's process, and what
# connects it with its launcher.
_CLAIM: Final = "ARRAYCOMM_RANK_PROCESS"


def claim(environment: MutableMapping[str, str], pid: int) -> None:
    """Let the processes that this one starts know that it is a rank."""
    environment[_CLAIM] = f"{pid} {_connection(environment)}"


def claimed_by(environment: Mapping[str, str], pid: int) -> int:
    """Return the process that is already the rank that the environment describes; 0 for none.

    A process that a rank has started inherits the launcher's variables, but is no rank; it is one if
    a launcher of its own has set them.
    """
    owner, _, connection = environment.get(_CLAIM, "").partition(" ")
    if not owner.isdigit() or int(owner) == pid or detect(environment) is None:
        return 0
    return int(owner) if _connection(environment) in ("", connection) else 0


def _connection(environment: Mapping[str, str]) -> str:
    """Return what connects a rank with its launcher, and no other process; empty if nothing does."""
    if "PMIX_NAMESPACE" in environment:
        return f"{environment['PMIX_NAMESPACE']}.{environment.get('PMIX_RANK', '')}"
    try:
        found = os.fstat(int(environment.get("PMI_FD", "")))
    except (OSError, ValueError):
        return ""
    return f"socket:{found.st_ino}" if stat.S_ISSOCK(found.st_mode) else ""
