"""Processes that no MPI launcher has started: their count, this one's number, where they meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from arraycomm._errors import BackendUnavailableError
from arraycomm._launch import ADDRESS, NUMBER, RANK, TORCHRUN, by_torchrun

_OWN: Final = (ADDRESS, NUMBER, RANK)
# The number of processes and that of this one, as Slurm sets them.
_SRUN: Final = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
SECRET: Final = "ARRAYCOMM_COORDINATOR_SECRET"
LIMIT: Final = "ARRAYCOMM_START_TIMEOUT"
DEFAULT_LIMIT: Final = 60.0
# Where batch systems say which job this is.
_JOBS: Final = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID")
EXAMPLE: Final = "127.0.0.1:4321"
_LAST_PORT: Final = 65535


class Place(NamedTuple):
    """Where processes meet: a host and a port, or a name that is known on this host alone."""

    host: str
    port: int
    name: str = ""

    @property
    def reach(self) -> str:
        """Say who can come there, as the end of a sentence; empty if not only some can."""
        if self.host and self.host != "localhost" and not self.host.startswith(("127.", "::1")):
            return ""
        user = "" if self.host else " of one user"
        return (
            f"; processes{user} in one network namespace reach it, as by docker run --network=host"
        )

    def __str__(self) -> str:
        if self.host:
            return f"{self.host}:{self.port}"
        return (
            "the socket of this host (without MPI all processes have to be on one host; on several "
            "start them with mpiexec)"
        )


class Numbering(NamedTuple):
    """The number of this process and of all, the variables that say so, and how they meet."""

    rank: int
    size: int
    place: Place
    variables: tuple[str, str]
    # Seconds in which all have to come.
    limit: float = DEFAULT_LIMIT
    secret: str = ""
    # What a batch system calls this job, as in `SLURM_JOB_ID 17`; empty without one.
    job: str = ""


def numbering(environment: Mapping[str, str]) -> Numbering | None:
    """Return what the environment says about processes without an MPI launcher, None if nothing."""
    if any(environment.get(name) for name in _OWN):
        return _by_own_variables(environment)
    return _by_torchrun(environment) if by_torchrun(environment) else None


def _by_own_variables(environment: Mapping[str, str]) -> Numbering:
    variables = next(
        (
            pair
            for pair in ((NUMBER, RANK), TORCHRUN, _SRUN)
            if all(environment.get(name) for name in pair)
        ),
        (NUMBER, RANK),
    )
    missing = [name for name in (ADDRESS, *variables) if not environment.get(name)]
    if missing:
        present = [name for name in _OWN if environment.get(name)]
        raise BackendUnavailableError(
            f"init: {' and '.join(present)} {'is' if len(present) == 1 else 'are'} set, but not "
            f"{' and '.join(missing)}; set {ADDRESS}, as in {EXAMPLE}, to the same on every "
            f"process, {NUMBER} to how many there are, and {RANK} to 0, 1 and so on; or unset all "
            "of them"
        )
    return _numbered(environment, variables, _place(environment[ADDRESS]))


def _place(said: str) -> Place:
    host, colon, port = said.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) <= _LAST_PORT:
        raise ValueError(
            f"init: {ADDRESS} must be a host and a port, as in {EXAMPLE}; got {said!r}"
        )
    return Place(host, int(port))


def _by_torchrun(environment: Mapping[str, str]) -> Numbering:
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    # Whoever listens at that port is torch's. So they meet under a name that is made of it.
    said = "/".join(environment.get(name, "") for name in names)
    found = _numbered(environment, TORCHRUN, Place("", 0, f"{os.getuid()}/{said}"))
    local = environment.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and int(local) < found.size:
        raise BackendUnavailableError(
            f"init: torchrun started {found.size} processes, of which {local} are on this host; "
            f"{without_mpi(found.size)}"
        )
    return found


def without_mpi(size: int) -> str:
    """Say what to do with processes on several hosts, as the end of a sentence."""
    return (
        "without MPI all processes have to be on one host; start the program with: "
        f"mpiexec -n {size} python …"
    )


def _numbered(
    environment: Mapping[str, str], variables: tuple[str, str], place: Place
) -> Numbering:
    number, rank = (environment[name] for name in variables)
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(f"init: {variables[0]} must be the number of processes; got {number!r}")
    if not rank.isdecimal() or int(rank) >= int(number):
        raise ValueError(
            f"init: {variables[1]} must be from 0 to {int(number) - 1}, since {variables[0]} is "
            f"{number}; got {rank!r}"
        )
    job = next((name for name in _JOBS if environment.get(name)), "")
    return Numbering(
        int(rank),
        int(number),
        place,
        variables,
        _seconds_to_start(environment),
        environment.get(SECRET, ""),
        job and f"{job} {environment[job]}",
    )


def _seconds_to_start(environment: Mapping[str, str]) -> float:
    said = environment.get(LIMIT) or str(DEFAULT_LIMIT)
    try:
        limit = float(said)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise ValueError(f"init: {LIMIT} must be a number of seconds; got {said!r}")
    return limit
