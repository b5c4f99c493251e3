"""Collectives of arrays on a device, whichever way they go: results come back there, and are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm._cuda.links.gpu_aware import gpu_aware
from tests.cuda.on_device.conftest import Framework
from tests.support import internals
from tests.support.collectives import COLLECTIVES
from tests.support.on_ranks import each_rank_of

Array = np.ndarray[Any, Any]


def rows(comm: Communicator, count: int, dtype: str = "float32") -> Array:
    """One row a rank, other values on every rank."""
    return (np.arange(comm.size * count) * 7 % 23 + comm.rank).astype(dtype).reshape(comm.size, -1)


# Of these, the ranks but the root pass nothing, so that nothing tells where the result is to be.
ROOTED = ("bcast to None", "scatter", "scatterv")


def check_like(got: Any, like: Any) -> None:
    assert type(got) is type(like)
    if not isinstance(like, np.ndarray):
        assert str(got.device) == str(like.device)


def check_same(framework: Framework, got: Any, want: Array | None) -> None:
    if want is None:
        assert got is None
        return
    found = got if isinstance(got, np.ndarray) else framework.back(got)
    assert (found.tobytes(), found.shape) == (want.tobytes(), want.shape)


@pytest.mark.parametrize("name", COLLECTIVES)
@each_rank_of()
def test_host_and_device_arrays_meet(comm, framework, name) -> None:
    """No rank, and each in turn, is the odd one, also in calls that repeat, with and without it on the host.

    Results are where that rank's own array is.
    """
    for count in (0, 5, 9000, 300_000):
        x = rows(comm, count)
        want = COLLECTIVES[name](comm, x)
        for odd in range(-1, comm.size):
            for on_host in (True, True, False, False):
                mine = x if (comm.rank == odd) == on_host else framework.make(x)
                got = COLLECTIVES[name](comm, mine)
                check_same(framework, got, want)
                if got is not None and odd < 0 and (name not in ROOTED or comm.rank == 0):
                    check_like(got, mine)
            check_same(framework, COLLECTIVES[name](comm, x), want)


@each_rank_of(by="mpi_job")
def test_mpi_that_reads_no_device_memory_is_handed_copies(comm) -> None:
    cupy = pytest.importorskip("cupy")
    # Several chunks, and a part of one.
    x = rows(comm, 3_000_001)
    got = comm.allreduce(cupy.asarray(x))
    assert got.get().tobytes() == comm.allreduce(x).tobytes()
    link = internals.device_link(comm)
    assert link is not None
    several = "mpi" if gpu_aware() else "staged"
    assert link.name == ("self" if comm.size == 1 else several)


# Trees ------------------------------------------------------------------------------------------


@each_rank_of()
def test_hundreds_of_leaves_are_reduced(comm, framework) -> None:
    x = np.arange(3, dtype="float32") + comm.rank
    one = framework.make(x)
    # Some launches of the kernel that gathers them.
    tree = [one] * 600
    want = comm.allreduce(x)
    got = ac.allreduce_tree(tree, "sum", comm=comm)
    assert all((framework.back(leaf) == want).all() for leaf in got[::97])
