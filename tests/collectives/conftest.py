"""`on_ranks(size, fn, *args)`: run a function on some ranks, and return what each returned.

The tests in this folder run over threads when pytest is alone, and over MPI when every rank of
`mpiexec -n 4 python -m pytest tests/collectives` runs them in step: once with the board in shared
memory, as on one node, and once with the board that travels, as between nodes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from arraycomm import _launch
from arraycomm._callsite import describe_exception
from arraycomm._communicator import Communicator, Options
from arraycomm._transports.control import FAILED, FINISHED
from arraycomm.testing import run

TIMEOUT = 20.0
LAUNCH = _launch.detect(os.environ)
TRANSPORTS = ["threads"] if LAUNCH is None else ["mpi-shared", "mpi-messages"]
SIZES = [1, 2, 3, 4] if LAUNCH is None else list(range(1, min(LAUNCH.size, 4) + 1))

# These test what is the same over either board, and go over one: the shared one under MPICH, the one
# that travels under Open MPI.
EITHER_BOARD = {
    f"test_{name}.py"
    for name in ("data", "devices", "join", "layouts", "metrics", "ops", "reference")
}
SPARED = "mpi-shared" if "OMPI_COMM_WORLD_RANK" in os.environ else "mpi-messages"

OnRanks = Callable[..., list[Any]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the second board where both would do the same."""
    spared = [item for item in items if _is_spared(item)]
    config.hook.pytest_deselected(items=spared)
    items[:] = [item for item in items if not _is_spared(item)]


def _is_spared(item: pytest.Item) -> bool:
    parameters = getattr(item, "callspec", None)
    return (
        item.path.parent == Path(__file__).parent
        and item.path.name in EITHER_BOARD
        and parameters is not None
        and parameters.params.get("transport") == SPARED
    )


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


@lru_cache
def _group(size: int) -> Any:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)


def _run_over_mpi(share: bool, size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run on the first `size` ranks; every rank of the job learns what each returned."""
    from mpi4py import MPI

    from arraycomm._transports.mpi import MPITransport

    group, result, error = _group(size), None, None
    if group != MPI.COMM_NULL:
        comm = Communicator(MPITransport(group.Dup(), share=share), Options(timeout=TIMEOUT))
        try:
            result = fn(comm, *args)
        except BaseException as raised:
            error = raised
        for member in comm._related:
            if error is None and member._closed is None:
                member._devices.close()
            state = FINISHED if error is None else FAILED
            member._control.leave(
                state, member._completed, describe_exception(error) if error else ""
            )
    said = describe_exception(error) if error else ""
    family = [] if group == MPI.COMM_NULL else comm._related
    # MPI gives a freed communicator's place to a new one, which would receive what is still on its way.
    clean = all(member._at_rest() for member in family)
    unmatched = sum(member._unmatched for member in family)
    results, texts, rests, left = zip(*_patiently((result, said, clean, unmatched)), strict=True)
    if all(rests) and sum(left) == 0:
        for member in family:
            member._link.free()
    if error is not None:
        raise error
    failed = [f"on rank {rank}:\n{text}" for rank, text in enumerate(texts) if text]
    if failed:
        pytest.fail(failed[0], pytrace=False)
    return list(results[:size])


def _patiently(mine: Any) -> list[Any]:
    """Gather from all ranks; those that wait leave the cores to those that still run the test."""
    from mpi4py import MPI

    arrived = MPI.COMM_WORLD.Ibarrier()
    while not arrived.Test():
        time.sleep(5e-4)
    return MPI.COMM_WORLD.allgather(mine)
