"""What the environment says about how a process was launched, and how it is to start."""

from __future__ import annotations

import os

import pytest

from arraycomm import BackendUnavailableError
from arraycomm._launch import Launch, detect, launched
from arraycomm._start import before_mpi
from arraycomm._start.choice import choose_start
from arraycomm._start.numbering import LIMIT, SECRET, Numbering, Place, numbering

OWN = {
    "ARRAYCOMM_COORDINATOR_ADDRESS": "127.0.0.1:4321",
    "ARRAYCOMM_NUM_PROCESSES": "4",
    "ARRAYCOMM_PROCESS_ID": "3",
}
PLACE = Place("127.0.0.1", 4321)
SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
}
MPIEXEC = {"PMI_SIZE": "4", "PMI_RANK": "1"}


def test_each_launcher_is_known_by_its_variables() -> None:
    assert detect({"PMI_SIZE": "3", "PMI_RANK": "0"}) == Launch(3, "an mpiexec of the MPICH family")
    assert detect({"OMPI_COMM_WORLD_SIZE": "4"}) == Launch(4, "Open MPI's mpiexec")
    assert detect({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}) == Launch(2, "srun")
    assert launched(OWN) == Launch(4, "whoever set ARRAYCOMM_NUM_PROCESSES")
    assert launched(TORCHRUN) == Launch(4, "torchrun")
    assert launched(OWN | MPIEXEC) == detect(MPIEXEC)


def test_nothing_else_is_taken_for_a_launcher() -> None:
    assert detect({"SLURM_STEP_NUM_TASKS": "2"}) is detect({}) is None
    assert detect({"PMI_SIZE": "many"}) is None
    assert detect({"PMIX_NAMESPACE": "one"}) is detect({"PMIX_RANK": "0"}) is None
    assert launched({"WORLD_SIZE": "8"}) is None
    assert numbering({"WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_NTASKS": "8"}) is None


def test_processes_are_numbered_by_what_started_them() -> None:
    address = {"ARRAYCOMM_COORDINATOR_ADDRESS": "127.0.0.1:4321"}
    own = ("ARRAYCOMM_NUM_PROCESSES", "ARRAYCOMM_PROCESS_ID")
    assert numbering(OWN) == numbering(OWN | SRUN) == Numbering(3, 4, PLACE, own)
    slurm = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    assert numbering(address | SRUN) == Numbering(2, 4, PLACE, slurm)
    assert numbering(address | TORCHRUN) == Numbering(1, 4, PLACE, ("WORLD_SIZE", "RANK"))
    assert numbering(OWN | {"ARRAYCOMM_COORDINATOR_ADDRESS": "[::1]:80"}) == Numbering(
        3, 4, Place("::1", 80), own
    )
    said = {LIMIT: "7", SECRET: "a", "PBS_JOBID": "8"}
    assert numbering(OWN | said) == Numbering(3, 4, PLACE, own, 7.0, "a", "PBS_JOBID 8")
    found = numbering(TORCHRUN)
    assert found is not None
    assert found.place.host == ""
    assert found.place == numbering(TORCHRUN | {"RANK": "0"}).place  # type: ignore[union-attr]
    for other in ({"MASTER_PORT": "1"}, {"TORCHELASTIC_RESTART_COUNT": "1"}):
        assert found.place != numbering(TORCHRUN | other).place  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"ARRAYCOMM_PROCESS_ID": ""}, BackendUnavailableError, "but not ARRAYCOMM_PROCESS_ID; set"),
        (
            {"ARRAYCOMM_COORDINATOR_ADDRESS": "", "ARRAYCOMM_NUM_PROCESSES": ""},
            BackendUnavailableError,
            "ARRAYCOMM_PROCESS_ID is set, but not ARRAYCOMM_COORDINATOR_ADDRESS and ARRAYCOMM_NUM",
        ),
        ({"ARRAYCOMM_PROCESS_ID": "4"}, ValueError, "ARRAYCOMM_PROCESS_ID must be from 0 to 3, since"),
        ({"ARRAYCOMM_PROCESS_ID": "-1"}, ValueError, "ARRAYCOMM_PROCESS_ID must be from 0 to 3"),
        ({"ARRAYCOMM_NUM_PROCESSES": "0"}, ValueError, "NUM_PROCESSES must be the number of processes"),
        ({"ARRAYCOMM_NUM_PROCESSES": "four"}, ValueError, "NUM_PROCESSES must be .*; got 'four'"),
        *(
            ({"ARRAYCOMM_COORDINATOR_ADDRESS": said}, ValueError, "must be a host and a port, as in")
            for said in ("4321", "host", ":4321", "host:", "host:0", "host:65536", "host:http")
        ),
        *(
            ({LIMIT: said}, ValueError, f"{LIMIT} must be a number of seconds; got '{said}'")
            for said in ("soon", "-1", "nan", "inf", "0")
        ),
    ],
)  # fmt: skip
def test_variables_that_do_not_fit_are_refused(changed, error, said) -> None:
    with pytest.raises(error, match=f"^init: .*{said}"):
        numbering(OWN | changed)


def test_torchrun_on_several_hosts_is_told_to_use_mpiexec() -> None:
    with pytest.raises(BackendUnavailableError, match=r"4 processes, of which 2 .*mpiexec -n 4"):
        numbering(TORCHRUN | {"LOCAL_WORLD_SIZE": "2"})


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch):
    """Return a function: the backend that an environment leads to, with an argument of `init`."""
    monkeypatch.setattr("arraycomm._start.choice.mpi_has_peers", lambda: False)

    def start(environment: dict[str, str], backend: str = "auto") -> str:
        monkeypatch.setattr("os.environ", environment)
        return choose_start(backend).backend

    return start


@pytest.mark.parametrize(
    ("environment", "backend", "expected"),
    [
        ({}, "auto", "self"),
        (OWN, "auto", "processes"),
        (TORCHRUN, "auto", "processes"),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, "auto", "self"),
        (OWN, "self", "self"),
        (OWN, "processes", "processes"),
        # MPI goes before.
        (MPIEXEC, "auto", "mpi"),
        (OWN | MPIEXEC, "auto", "mpi"),
        (OWN | MPIEXEC, "processes", "processes"),
        ({"ARRAYCOMM_COORDINATOR_ADDRESS": "x:1"} | MPIEXEC, "auto", "mpi"),
        # Slurm may have connected them; who says where they meet wants no MPI.
        (SRUN, "auto", "mpi"),
        (SRUN | OWN, "auto", "processes"),
        (SRUN | {"ARRAYCOMM_COORDINATOR_ADDRESS": "x:1"}, "auto", "processes"),
        (SRUN | OWN | {"PMIX_RANK": "2"}, "auto", "processes"),
        (SRUN | {"PMIX_RANK": "2"}, "auto", "mpi"),
        ({"PMIX_NAMESPACE": "one", "PMIX_RANK": "2"}, "auto", "mpi"),
        # torchrun, started once on a node.
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"} | TORCHRUN, "auto", "processes"),
    ],
)  # fmt: skip
def test_backend_follows_from_the_environment(starts, environment, backend, expected) -> None:
    assert starts(environment, backend) == expected


def test_only_one_process_alone_may_do_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arraycomm._start.choice.mpi_has_peers", lambda: False)
    one = SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    for environment, alone in ((one, True), (one | {"PMIX_RANK": "0"}, True), (SRUN, False)):
        monkeypatch.setattr("os.environ", environment)
        assert choose_start("auto").alone == alone
        assert not choose_start("mpi").alone


def test_srun_is_named_also_where_it_speaks_as_a_process_manager() -> None:
    pmi = {"PMI_SIZE": "4", "PMI_RANK": "2"}
    assert detect(SRUN | pmi) == Launch(4, "srun")
    # An mpiexec in a step of srun.
    assert detect(SRUN | pmi | {"PMI_RANK": "1"}) == Launch(4, "an mpiexec of the MPICH family")


@pytest.mark.parametrize(
    ("environment", "backend", "said"),
    [
        (OWN | {"PMI_SIZE": "3"}, "auto", "started 3 processes, but ARRAYCOMM_NUM_PROCESSES is 4"),
        (TORCHRUN | {"PMI_SIZE": "1"}, "auto", "started 1 process, but WORLD_SIZE is 4"),
        ({}, "processes", "backend 'processes' needs ARRAYCOMM_COORDINATOR_ADDRESS, as in"),
        (OWN, "mpi", "NUM_PROCESSES is 4, but no MPI launcher .*without backend='mpi'"),
        (TORCHRUN, "nccl", "WORLD_SIZE is 4, but no MPI launcher"),
    ],
)
def test_contradictions_are_refused(starts, environment, backend, said) -> None:
    with pytest.raises(BackendUnavailableError, match=f"^init: .*{said}"):
        starts(environment, backend)


def test_mpi_of_the_mpich_family_needs_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process, with an error that names none."""
    monkeypatch.setattr(before_mpi, "_SHARED", "/dev/no-shared-memory")
    with pytest.raises(
        BackendUnavailableError, match=r"there is no /dev/no-shared-memory; make it"
    ):
        before_mpi.check_room({"MPI_LOCALNRANKS": "2"}, dict)
    for alone in ({}, {"MPI_LOCALNRANKS": "1"}):
        before_mpi.check_room(alone, dict)


def test_what_ranks_have_taken_that_have_begun_is_not_missing() -> None:
    """But UCX is to take no more of it."""
    ranks = 1000 * (os.statvfs("/dev/shm").f_blocks >> 8)
    environment = {"MPI_LOCALNRANKS": str(ranks)}
    with pytest.raises(BackendUnavailableError, match=r"MiB free of .*; make it larger"):
        before_mpi.check_room(environment, lambda: {0: False})
    before_mpi.check_room(environment, lambda: {0: False, 1: True})
    assert environment["UCX_TLS"] == "^posix"
