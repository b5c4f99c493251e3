"""How programs start: one world of all ranks, or an error on each within the time that there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.session.launching import LIMIT, launch
from tests.support.launcher import LAUNCHED, LAUNCHER, SETTINGS, is_open_mpi, needs_mpiexec

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")

# Rank 1 passes something wrong, and the others the same things right; each is an error on every rank, and then all start.
WRONG_IN_INIT = """
import os
me = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
kinds = [{"timeout": "x"}, {"check": "maybe"}, {"reproducible": 2}, {"verbose": 1}, {"report_after": -1}, {"device": 3}, {"backend": "mpich"}]
kinds += ["ARRAYCOMM_TIMEOUT", "ARRAYCOMM_CHECK", "ARRAYCOMM_REPORT_AFTER"]
for kind in kinds:
    if isinstance(kind, str) and me == 1:
        os.environ[kind] = "soon"
    try:
        ac.init(**(kind if isinstance(kind, dict) and me == 1 else {}))
    except (TypeError, ValueError) as error:
        assert me == 1, kind
    except ac.PeerError as error:
        assert me != 1 and "rank 1 raised" in str(error), (kind, str(error))
    else:
        raise AssertionError(kind)
    os.environ.pop(kind if isinstance(kind, str) else "", "")
assert ac.init().allreduce(1) == 3
"""
# Rank 1 does not come to a call, comes too late, or comes with what is no communicator.
LATE_IN_FROM_MPI = """
from mpi4py import MPI
make = ac.Communicator.from_mpi
me, world = MPI.COMM_WORLD.rank, MPI.COMM_WORLD
def one(late, wrong=None):
    comm = world.Dup()
    try:
        if me == late:
            if wrong is not None:
                make(wrong)
            time.sleep(5)
        make(comm, timeout=1)
    except Exception as error:
        sys.stdout.write(f"{late} late, rank {me}: {type(error).__name__}: {error}\\n")
    world.Barrier()
one(1)
one(0)
for wrong in (MPI.COMM_NULL, "no communicator"):
    try:
        one(2, wrong)
    except TypeError:
        pass
assert make(world).allreduce(1) == 3
"""


@needs_mpiexec
@pytest.mark.each_mpi
class TestOverMpi:
    def test_wrong_argument_of_one_rank_is_told_to_all(self) -> None:
        done = launch(WRONG_IN_INIT, ranks=3)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_rank_that_does_not_come_is_named_and_told(self) -> None:
        done = launch(LATE_IN_FROM_MPI, ranks=3)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        waited = "CommTimeoutError: from_mpi: waited 1 s (timeout 1 s) for rank"
        assert f"1 late, rank 0: {waited} 1, which has not called it" in said
        told = "from_mpi: rank 0 has waited 1 s for rank 1, which has not called it"
        assert f"1 late, rank 1: PeerError: {told}" in said
        assert f"1 late, rank 2: CommTimeoutError: {told}" in said
        assert f"0 late, rank 1: {waited} 0, which has not called it" in said
        assert f"0 late, rank 2: {waited} 0, which has not called it" in said
        late = "0 late, rank 0: PeerError: from_mpi: ranks 1, 2 had given up waiting for rank 0"
        assert late in said
        assert said.count("2 late, rank 2: TypeError: from_mpi: mpi4py_comm must be an intra") == 2

    def test_mpi_that_does_not_begin_ends_the_job_in_time(self) -> None:
        late = 1
        begun = time.monotonic()
        done = launch(f"""
            import os
            rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
            if rank == "{late}":
                time.sleep(100)
            ac.init(timeout=3, report_after=1)
        """)
        assert time.monotonic() - begun < LIMIT / 2
        assert done.returncode != 0
        takes = f"MPI to begin, which takes every rank: rank {late} of this node has not called it"
        assert f"arraycomm: still waiting in init for {takes}" in done.stderr
        assert "CommTimeoutError: init: MPI has not begun in time" in done.stderr

    def test_ranks_without_their_environment_are_no_worlds_of_one(self) -> None:
        program = "import arraycomm as ac; print(ac.init().size, ac.init().allreduce(1))"
        several = _mpiexec(2, "env", "-i", sys.executable, "-c", program)
        assert several.returncode != 0
        assert "has started 2 processes, of which this is one" in several.stderr
        one = _mpiexec(1, "env", "-i", sys.executable, "-c", program)
        assert one.stdout == "1 1\n", one.stderr

    @pytest.mark.parametrize(
        "lacks",
        ["sys.modules['mpi4py'] = None", "os.environ['MPI4PY_LIBMPI'] = '/nowhere/libmpi.so'"],
    )
    def test_launcher_without_an_mpi_is_an_error(self, lacks: str) -> None:
        program = f"import os, sys, arraycomm as ac; {lacks}; ac.init()"
        done = _run([sys.executable, "-c", program], PMI_SIZE="2", PMI_RANK="0")
        assert done.returncode == 1
        said = r"BackendUnavailableError: init: no MPI could be loaded \((import of mpi4py|cannot load)"
        assert re.search(
            rf"{said}.*; install one beside mpi4py, .* pip install mpich$", done.stderr
        )

    def test_launchers_of_pmix_start_one_world(self) -> None:
        prterun = LAUNCHER.with_name("prterun")
        if not is_open_mpi() or not prterun.exists():
            pytest.skip("needs prterun")
        words = [str(prterun), "-n", "2", sys.executable, "-c"]
        program = "import arraycomm as ac; print(ac.init().size, ac.init().allreduce(1))"
        done = _run([*words, program])
        assert done.stdout == "2 2\n2 2\n", done.stderr


def _mpiexec(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    return _run([str(LAUNCHER), "-n", str(ranks), *words])


def _run(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    roots = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        words,
        env=os.environ | SETTINGS | roots | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        cwd=Path(__file__).parents[2],
    )
