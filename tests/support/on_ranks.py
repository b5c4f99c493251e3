"""`on_ranks(size, fn, *args)`: run a function on some ranks, and return what each returned.

`@each_rank_of(3)` makes a test of what each of three ranks does.

Tests that take it run over threads if pytest is alone, and over MPI if every rank of
`mpiexec -n 4 python -m pytest tests/collectives` runs them in step: with the control channel in
shared memory, as on one node, or with the one that goes by messages, as between nodes. A job of an
even number of ranks tries even ones, and one of an odd number odd ones. Threads try all of them with each
test, and a job one with most. EVERY=1 runs all of both.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from zlib import crc32

import pytest

from arraycomm import Communicator, _launch
from arraycomm._callsite import describe_exception
from arraycomm._transports.notes import FAILED, FINISHED
from arraycomm.testing import run
from tests.support import internals
from tests.support.pairwise import EVERY

TIMEOUT = 20.0
LAUNCH = _launch.detect(os.environ)
MPI = ["mpi-shared", "mpi-messages"]
# The classes of laws over each.
_CHANNELS = {"TestSharedMemory": "mpi-shared", "TestMessages": "mpi-messages"}
TRANSPORTS = ["threads"] if LAUNCH is None else MPI
ALL_SIZES = list(range(1, min(4 if LAUNCH is None else LAUNCH.size, 4) + 1))
# Of MPI's jobs one has an even number of ranks, and the other an odd one: each tries half of the sizes.
SIZES = [s for s in ALL_SIZES if EVERY or LAUNCH is None or (LAUNCH.size - s) % 2 == 0]

# Of tests that make threads of their own, on each rank of a job the same.
alone = pytest.mark.skipif(LAUNCH is not None, reason="runs where pytest is alone")

OnRanks = Callable[..., list[Any]]


def each_rank_of(
    count: int | tuple[int, ...] | str | None = None, *modules: str, by: str = "on_ranks"
) -> Callable[[Callable[..., None]], Any]:
    """Make a test of what each rank does; `comm` is its communicator, other arguments are fixtures.

    Parameters
    ----------
    count : int, tuple of int or str
        How many ranks, one number after the other, or the fixture that tells: `size`, `several` or
        `few`. Without it the fixture `by` takes no number.
    *modules : str
        Without one of these the test is skipped; they are arguments as well.
    by : str
        The fixture that runs a function on ranks.
    """

    def decorate(does: Callable[..., None]) -> Any:
        own = inspect.signature(does).parameters.values()
        bound = [parameter for parameter in own if parameter.name == "self"]
        known = ("self", "comm", *modules)
        wanted = [parameter.name for parameter in own if parameter.name not in known]
        fixture = [count] if isinstance(count, str) else []

        @functools.wraps(does)
        def test(*self: Any, **fixtures: Any) -> None:
            given = {name: fixtures[name] for name in wanted}
            given |= {name: pytest.importorskip(name) for name in modules}
            counts = [fixtures[name] for name in fixture] or count
            for each in counts if isinstance(counts, (list, tuple)) else [counts]:
                size = [] if each is None else [each]
                fixtures[by](*size, lambda comm: does(*self, comm=comm, **given))

        asked = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in dict.fromkeys((by, *fixture, *wanted))
        ]
        test.__signature__ = inspect.Signature([*bound, *asked])  # type: ignore[attr-defined]
        return test

    return decorate


def is_spared(item: pytest.Item) -> bool:
    """Return whether a test goes over this control channel under the other MPI, or on other ranks.

    Half of the tests, and of the laws, go over shared memory under MPICH, and by messages under Open MPI; the
    others the other way round. In a job of an even number of ranks half of them take all, and the others half of
    them; in one of an odd number all take all, and a quarter of them one as well. A table of cases may be
    shared out between the MPIs.
    """
    parameters = getattr(item, "callspec", None)
    given = {} if parameters is None else parameters.params
    channel = given.get("transport") or _CHANNELS.get(getattr(item.parent, "name", ""), "")
    if EVERY or channel not in MPI:
        return False
    open_mpi = "OMPI_COMM_WORLD_RANK" in os.environ
    if item.get_closest_marker("half_of_the_cases") and _half(str(given["case"])) != open_mpi:
        return True
    if item.get_closest_marker("both_control_channels"):
        return False
    number = crc32(item.nodeid.partition("[")[0].rpartition("::")[2].encode())
    turn = (number + open_mpi) % 2
    return MPI[turn] == channel or not _takes(number >> 1, given.get("size", given.get("several")))


def _half(case: str) -> int:
    """Tell which MPI a case belongs to, however many others there are."""
    return crc32(case.encode()) % 2


def _takes(number: int, size: int | None) -> bool:
    """Return whether the test of this number runs on this many ranks of an MPI job."""
    return {None: True, 1: number % 4 == 0, 2: number % 2 == 0, 4: number % 2 == 1}.get(size, True)


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
            _close_devices(comm)
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


def _close_devices(comm: Communicator) -> None:
    for member in internals.related(comm):
        if not internals.is_closed(member):
            internals.close_devices(member)


def _announce_exit(comm: Communicator, error: BaseException | None) -> None:
    for member in internals.related(comm):
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
