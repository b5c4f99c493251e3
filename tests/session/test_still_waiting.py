"""One rank prints for whom a call waits, once it waits long."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from arraycomm import Communicator
from arraycomm._protocol.waits import still_waiting
from arraycomm.testing import run
from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python

pytestmark = pytest.mark.skipif(LAUNCHED, reason="runs where pytest is alone")

# Seconds after which the line is printed, and for which a rank is late: long enough for a machine that is busy.
AFTER = 0.2
LATE = 1.0


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    before = still_waiting.report_after()
    still_waiting.choose(AFTER)
    yield
    still_waiting.choose(before)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("arraycomm: still waiting")]


def late(comm: Communicator, rank: int) -> None:
    comm.barrier()
    if comm.rank == rank:
        time.sleep(LATE)
    comm.allreduce(1)


def test_rank_0_says_it_once_a_wait_and_another_one_only_if_rank_0_is_late(capsys) -> None:
    def check(comm: Communicator) -> None:
        late(comm, 2)
        late(comm, 0)

    run(3, check)
    first, second = lines(capsys.readouterr().err)
    where = "arraycomm: still waiting in allreduce at test_still_waiting.py:"
    assert first.startswith(where)
    assert first.endswith(" for rank 2, which is in its own code since barrier")
    assert second.endswith(" for rank 0, which is in its own code since barrier")


def test_ranks_at_one_place_are_named_together(capsys: pytest.CaptureFixture[str]) -> None:
    def wait(comm: Communicator) -> None:
        other = comm.dup()
        comm.allgather(1)
        if comm.rank == 3:
            other.recv(1)
        # Rank 0 waits once rank 3 does.
        time.sleep((LATE / 4, LATE, LATE, 0)[comm.rank])
        if comm.rank == 1:
            other.send(1, 3)
        comm.barrier()

    run(4, wait)
    (line,) = [line for line in lines(capsys.readouterr().err) if "in barrier" in line]
    named = line.partition(" for ")[2].split("; ")
    assert named[0] == "ranks 1, 2, which are in their own code since allgather"
    assert named[1].startswith(
        "rank 3, which is waiting in recv from rank 1 with tag 0 at test_still"
    )


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_nothing_is_said_before_or_if_it_is_turned_off(seconds, capsys) -> None:
    still_waiting.choose(seconds)
    run(2, late, 1)
    assert lines(capsys.readouterr().err) == []


def test_a_request_that_nobody_waits_for_yet_is_no_wait(capsys: pytest.CaptureFixture[str]) -> None:
    def check(comm: Communicator) -> None:
        if comm.rank == 1:
            time.sleep(LATE)
        request = comm.iallreduce(1)
        time.sleep((2 - comm.rank) * LATE)
        request.wait()

    run(2, check)
    assert lines(capsys.readouterr().err) == []


@needs_mpiexec
def test_a_request_that_the_end_of_the_program_waits_for_is_a_wait() -> None:
    program = (
        "import arraycomm as ac\n"
        f"comm = ac.init(report_after={AFTER}, timeout=2)\n"
        "request = comm.irecv(1 - comm.rank)"
    )
    said = lines(run_python("-c", program, ranks=2).stderr)
    assert any(" in recv from rank 1 with tag 0 at <string>:3 for rank 1" in line for line in said)


@needs_mpiexec
@pytest.mark.parametrize(
    ("ranks", "late", "after"),
    [
        pytest.param(3, 2, AFTER, id="3", marks=pytest.mark.each_mpi),
        # Who asks whom is the same over any MPI.
        pytest.param(10, 0, 1.0, id="10"),
    ],
)
def test_between_nodes_ranks_are_asked_where_they_are(ranks: int, late: int, after: float) -> None:
    """With more than a few ranks some ask for all; here the first of them is late."""
    program = (
        "import time, arraycomm as ac\n"
        "from tests.support import internals; internals.refuse_shared_memory()\n"
        f"comm = ac.init(report_after={after}); comm.barrier()\n"
        f"if comm.rank == {late}: time.sleep({after + LATE})\n"
        "comm.allreduce(1)"
    )
    job = run_python("-c", program, ranks=ranks)
    assert job.returncode == 0, job.stderr
    # A rank may also be late at the start.
    (line,) = [line for line in lines(job.stderr) if " in allreduce at " in line]
    assert line.endswith(
        f" in allreduce at <string>:5 for rank {late}, which is in its own code since barrier"
    )
