"""Checks of processes that ranks start, in one program of two ranks; see `test_processes.py`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.support import internals
from tests.support.launched import checks_in, perform

RANKS = 2
# Seconds after which a child hangs.
HANGING = 30
REFUSED = "a forked process cannot use the communicator of its parent"


def _in_forked_child(check: Callable[[], None]) -> None:
    """Run a check in a forked child, which may neither hang nor raise anything but what is expected."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(HANGING)
        status = 1
        try:
            check()
            status = 0
        except BaseException as error:
            sys.stderr.write(f"in the child: {error!r}\n")
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def forked_child_is_refused_everything_while_requests_are_outstanding() -> None:
    from mpi4py import MPI

    comm = ac.init(timeout=60)
    peer, x = 1 - comm.rank, np.ones(3)
    for _ in range(3):
        # The second call takes the fast path.
        comm.allreduce(x)
    plan = comm.plan({"w": x})
    requests = [comm.irecv(peer), comm.iallreduce(np.ones(500_000)), comm.iallreduce(x)]
    calls: dict[str, Callable[[], Any]] = {
        "init": ac.init,
        "init over mpi": lambda: ac.init(backend="mpi"),
        "world": ac.world,
        "println": lambda: ac.println("x"),
        "allreduce": lambda: comm.allreduce(x),
        "iallreduce": lambda: comm.iallreduce(x),
        "barrier": comm.barrier,
        "send": lambda: comm.send(x, peer),
        "irecv": lambda: comm.irecv(peer),
        "plan": lambda: plan({"w": x}),
        "dup": comm.dup,
        "split": lambda: comm.split(0),
        "wait": requests[0].wait,
        "test": requests[0].test,
        "waitall": lambda: ac.waitall(requests),
        "allreduce_tree": lambda: ac.allreduce_tree({"w": x}, comm=comm),
        "from_mpi": lambda: ac.Communicator.from_mpi(MPI.COMM_WORLD),
    }

    def check() -> None:
        for name, call in calls.items():
            try:
                found: Any = call()
            except ac.CommunicatorClosedError as error:
                found = str(error)
            assert REFUSED in str(found), (name, found)
        assert not ac.is_initialized()
        ac.finalize()

    _in_forked_child(check)
    # So the first request is outstanding in both children.
    comm.barrier()
    comm.send(np.arange(4), peer)
    assert requests[0].wait().tolist() == [0, 1, 2, 3]
    assert requests[1].wait()[0] == RANKS
    assert requests[2].wait().tolist() == [RANKS] * 3


def child_forked_within_a_call_is_refused() -> None:
    """The thread that forks is not the one that calls, whose locks the child inherits."""
    comm = ac.world()
    assert internals.engine(comm).turn.acquire(False)
    try:

        def check() -> None:
            with pytest.raises(ac.CommunicatorClosedError, match=REFUSED):
                comm.allreduce(np.ones(3))

        _in_forked_child(check)
    finally:
        internals.engine(comm).turn.release()
    assert comm.allreduce(1) == RANKS


def forked_child_may_have_a_world_of_its_own_and_reads_this_ranks_items() -> None:
    share = ac.DistributedDataContainer([10, 20, 30, 40])
    items = list(share)

    def check() -> None:
        alone = ac.init(backend="self")
        assert alone.allreduce(np.ones(3)).tolist() == [1, 1, 1]
        assert ac.world() is alone
        assert list(share) == items

    _in_forked_child(check)
    assert ac.world().allreduce(1) == RANKS


def _called_in_spawned_child(share: ac.DistributedDataContainer) -> tuple[str, int, list[Any]]:
    try:
        said = repr(ac.init())
    except ac.BackendUnavailableError as error:
        said = str(error)
    return said, ac.init(backend="self").size, list(share)


def spawned_child_is_no_rank_but_reads_this_ranks_items() -> None:
    share = ac.DistributedDataContainer([10, 20, 30, 40])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        said, size, items = pool.apply(_called_in_spawned_child, (share,))
    assert f"process {os.getpid()} is the rank that the launcher has started" in said
    assert size == 1
    assert items == list(share)
    assert ac.world().allreduce(1) == RANKS


def forked_child_ends_without_mpi() -> None:
    """MPI's own end would wait there for all ranks, or end their job."""
    for status in (None, 3):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(HANGING)
            sys.exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (status or 0)
    assert ac.world().allreduce(1) == RANKS


def program_that_a_rank_runs_is_told_that_it_is_none() -> None:
    program = [sys.executable, "-c", "import arraycomm; arraycomm.init()"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=HANGING, check=False)
    assert done.returncode == 1
    assert "BackendUnavailableError: init: process" in done.stderr, done.stderr
    ac.world().barrier()


CHECKS = checks_in(globals())

if __name__ == "__main__":
    perform(CHECKS)
