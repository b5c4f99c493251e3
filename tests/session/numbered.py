"""Checks of processes that only the environment numbers, without MPI; see `test_numbered.py`.

The environment says which process this is. The last check ends one process by a signal.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time

import numpy as np
import pytest

import arraycomm as ac
from tests.support.launched import checks_in, perform

RANKS = 3
KILLED = 1
# Seconds in which the others know of it.
SOON = 20.0
ME = int(os.environ.get("ARRAYCOMM_PROCESS_ID", "0"))


def wrong_argument_of_one_is_told_to_all() -> None:
    error, said = (ValueError, "timeout must be") if ME == 2 else (ac.PeerError, "rank 2 raised")
    with pytest.raises(error, match=said):
        ac.init(timeout=-1.0 if ME == 2 else 60.0)
    assert not ac.is_initialized()


def numbered_processes_are_the_world() -> None:
    comm = ac.init(timeout=60.0)
    assert (comm.backend, comm.rank, comm.size) == ("processes", ME, RANKS)
    assert (comm.local_rank, comm.local_size) == (ME, RANKS)
    assert "mpi4py.MPI" not in sys.modules
    assert (
        comm.allreduce(np.arange(200_000.0) + ME).tolist()
        == (3 * np.arange(200_000.0) + 3).tolist()
    )
    assert comm.allgather_object(ME) == [0, 1, 2]
    # What no longer fits into a ring moves only while its sender asks for it.
    for length in (3, 8_192, 20_000, 1_000_000):
        got = comm.sendrecv(np.full(length, ME), (ME + 1) % RANKS, (ME - 1) % RANKS)
        assert got.tolist() == [(ME - 1) % RANKS] * length
    part = comm.split(ME % 2, -ME)
    assert part is not None
    assert part.allgather_object(ME) == ([2, 0] if ME % 2 == 0 else [1])
    assert comm.plan({"w": np.ones(9)})({"w": np.full(9, float(ME))})["w"].tolist() == [1.0] * 9


def init_again_is_the_same_world() -> None:
    assert ac.init() is ac.init("processes") is ac.world()
    with pytest.raises(ValueError, match="backend 'processes' before; got 'mpi'"):
        ac.init("mpi")


def mismatch_is_an_error_on_every_rank() -> None:
    part = ac.world().dup()
    with pytest.raises(ac.MismatchError, match="different things"):
        part.allreduce(np.ones(3 + (ME == 1)))


def no_survivor_shrinks() -> None:
    with pytest.raises(ac.BackendUnavailableError, match="transport 'processes'"):
        ac.world().dup().shrink()


def _said_in_spawned_child() -> str:
    try:
        return repr(ac.init())
    except ac.BackendUnavailableError as error:
        return str(error)


def spawned_child_is_no_rank() -> None:
    if ME == 0:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            said = pool.apply(_said_in_spawned_child)
        assert f"process {os.getpid()} is the rank that the launcher has started" in said
    ac.world().barrier()


def finalized_world_can_begin_again() -> None:
    ac.finalize()
    assert ac.init("processes").allreduce(1) == RANKS
    ac.finalize()


def processes_of_torchrun_are_the_world_too() -> None:
    """Whoever listens at its port is torch's."""
    with pytest.MonkeyPatch.context() as patch:
        numbers = {"RANK": str(ME), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
        _, port = os.environ["ARRAYCOMM_COORDINATOR_ADDRESS"].split(":")
        for name in [name for name in os.environ if name.startswith("ARRAYCOMM_")]:
            patch.delenv(name)
        for name, value in (numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items():
            patch.setenv(name, value)
        patch.setenv("TORCHELASTIC_RUN_ID", "none")
        comm = ac.init()
        assert (comm.backend, comm.rank, comm.size) == ("processes", ME, RANKS)
        ac.finalize()


def others_hear_of_one_that_is_killed() -> None:
    comm = ac.init()
    part = comm.split(0, -ME)
    assert part is not None
    x = np.ones(3)
    for _ in range(3):
        # The next one takes the fast path.
        part.allreduce(x)
    comm.barrier()
    if ME == KILLED:
        time.sleep(0.2)
        sys.stdout.write("<others_hear_of_one_that_is_killed passed>\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(
        ac.PeerError, match=f"rank {RANKS - 1 - KILLED} has died without a word; it"
    ) as caught:
        part.allreduce(x)
    assert "shrink" not in str(caught.value)
    with pytest.raises(ac.PeerError, match=f"rank {KILLED} has died without a word"):
        comm.recv(KILLED)
    assert time.monotonic() < begun + SOON


CHECKS = checks_in(globals())

if __name__ == "__main__":
    perform(CHECKS)
