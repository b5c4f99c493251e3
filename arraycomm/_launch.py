"""What the environment says about how this process was launched."""

from __future__ import annotations

from collections.abc import Mapping
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
