"""`on_ranks(size, fn, *args)`: run a function on some ranks, and return what each returned.

Tests that take it run over threads if pytest is alone, and over MPI if every rank of
`mpiexec -n 4 python -m pytest tests/collectives` runs them in step: with the control channel in
shared memory, as on one node, or with the one that goes by messages, as between nodes. A job of an
even number of ranks tries even ones, and one of an odd number odd ones. EVERY=1 runs all of both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from zlib import crc32

import pytest

from arraycomm import Communicator, _launch
from arraycomm._callsite import describe_exception
from arraycomm._transports.control import FAILED, FINISHED
from arraycomm.testing import run
from tests.support import internals
from tests.support.pairwise import EVERY

TIMEOUT = 20.0
LAUNCH = _launch.detect(os.environ)
MPI = ["mpi-shared", "mpi-messages"]
TRANSPORTS = ["threads"] if LAUNCH is None else MPI
ALL_SIZES = list(range(1, min(4 if LAUNCH is None else LAUNCH.size, 4) + 1))
# Of MPI's jobs one has an even number of ranks, and the other an odd one: each tries half of the sizes.
SIZES = [s for s in ALL_SIZES if EVERY or LAUNCH is None or (LAUNCH.size - s) % 2 == 0]

OnRanks = Callable[..., list[Any]]


def is_spared(item: pytest.Item) -> bool:
    """Tell whether a test goes over this control channel under the other MPI.

    Half of the tests go over shared memory under MPICH, and by messages under Open MPI; the others
    the other way round.
    """
    parameters = getattr(item, "callspec", None)
    channel = "" if parameters is None else parameters.params.get("transport", "")
    if EVERY or channel not in MPI or item.get_closest_marker("both_control_channels"):
        return False
    name = item.nodeid.partition("[")[0].rpartition("::")[2]
    turn = (crc32(name.encode()) + ("OMPI_COMM_WORLD_RANK" in os.environ)) % 2
    return MPI[turn] == channel


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def on_ranks(transport: str) -> OnRanks:
    if transport == "threads":
        return lambda size, fn, *args: run(size, fn, *args, timeout=TIMEOUT)
    return lambda size, fn, *args: _run_over_mpi(transport == "mpi-shared", size, fn, *args)


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(params=[s for s in SIZES if s > 1])
def several(request: pytest.FixtureRequest) -> int:
    """A number of ranks with which ranks can differ."""
    number: int = request.param
    return number


@pytest.fixture(params=[s for s in ALL_SIZES if s in (1, 3)])
def few(request: pytest.FixtureRequest) -> int:
    """One rank alone, or several, if the number makes no other difference."""
    number: int = request.param
    return number


@lru_cache
def _group(size: int) -> Any:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)


def _run_over_mpi(share: bool, size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run on the first `size` ranks; every rank of the job learns what each returned."""
    from mpi4py import MPI

    group, result, error = _group(size), None, None
    if group != MPI.COMM_NULL:
        comm = internals.mpi_communicator(group.Dup(), share=share, timeout=TIMEOUT)
        try:
            result = fn(comm, *args)
        except BaseException as raised:
            error = raised
        _announce_exit(comm, error)
    said = describe_exception(error) if error else ""
    family = [] if group == MPI.COMM_NULL else internals.related(comm)
    # MPI gives a freed communicator's place to a new one, which would receive what is still on its way.
    clean = all(internals.is_at_rest(member) for member in family)
    unmatched = sum(internals.unmatched(member) for member in family)
    results, texts, rests, left = zip(*_patiently((result, said, clean, unmatched)), strict=True)
    if all(rests) and sum(left) == 0:
        for member in family:
            internals.transport(member).free()
    if error is not None:
        raise error
    failed = [f"on rank {rank}:\n{text}" for rank, text in enumerate(texts) if text]
    if failed:
        pytest.fail(failed[0], pytrace=False)
    return list(results[:size])


def _announce_exit(comm: Communicator, error: BaseException | None) -> None:
    for member in internals.related(comm):
        if error is None and not internals.is_closed(member):
            internals.close_devices(member)
        if error is None:
            internals.announce_exit(member, FINISHED)
        else:
            internals.announce_exit(member, FAILED, describe_exception(error))


def _patiently(mine: Any) -> list[Any]:
    """Gather from all ranks; those that wait leave the cores to those that still run the test."""
    from mpi4py import MPI

    arrived = MPI.COMM_WORLD.Ibarrier()
    while not arrived.Test():
        time.sleep(5e-4)
    return MPI.COMM_WORLD.allgather(mine)
