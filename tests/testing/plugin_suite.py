"""Tests as a user has them, of which some fail; run by test_plugin.py on threads and under mpiexec."""

from __future__ import annotations

import contextlib
import os
import time
import unittest
import warnings
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

import arraycomm as ac
from arraycomm.testing import given

LAUNCHED = "PMI_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ
only_processes = pytest.mark.skipif(not LAUNCHED, reason="needs processes")


@pytest.fixture(scope="session")
def shared() -> list[int]:
    return []


@pytest.fixture(scope="module", params=["a", "b"])
def letter(request: pytest.FixtureRequest, shared: list[int]) -> str:
    shared.append(1)
    return str(request.param)


@pytest.fixture
def mine(comm: ac.Communicator) -> Iterator[int]:
    yield comm.rank
    comm.barrier()


@pytest.fixture
def twice(mine: int) -> int:
    return 2 * mine


class TestFixtures:
    @pytest.fixture
    def method(self, comm: ac.Communicator) -> tuple[TestFixtures, int]:
        return self, comm.size

    def test_every_scope(self, comm, shared, letter, twice, method, tmp_path) -> None:
        assert tmp_path.is_dir()
        assert method == (self, comm.size)
        assert comm.allreduce(twice) == comm.size * (comm.size - 1)
        assert len(shared) == "ab".index(letter) + 1


def test_usual_count(comm) -> None:
    assert comm.size == 3


@pytest.mark.ranks(1, 2, 7)
@pytest.mark.parametrize("x", [5, 6])
def test_counts(comm, x) -> None:
    assert comm.size in (1, 2, 7)
    assert comm.allreduce(x) == x * comm.size


@pytest.mark.ranks(5)
def test_without_comm_on_other_ranks() -> None:
    raise AssertionError("it runs nowhere")


def test_fails_on_one_rank(comm) -> None:
    comm.barrier()
    print(f"said by {comm.rank}")
    if comm.rank == 1:
        raise ValueError("planted")
    comm.barrier()


def test_after_a_failure(comm) -> None:
    assert comm.allreduce(1) == 3


def test_fails_on_every_rank(comm) -> None:
    assert comm.size == 99


def test_mismatch(comm) -> None:
    if comm.rank == 1:
        comm.barrier()
    else:
        comm.allreduce(1)


def test_leaves_out_a_call(comm) -> None:
    if comm.rank != 0:
        comm.barrier()


def test_leaves_out_a_call_with_a_fixture(comm, mine) -> None:
    if comm.rank != 0:
        comm.barrier()


def test_expects_an_error(comm) -> None:
    with pytest.raises(ac.MismatchError):
        comm.bcast(0, root=comm.rank)


def test_skips_on_one_rank(comm) -> None:
    if comm.rank == 2:
        pytest.skip("not here")
    comm.barrier()


def test_subtest_fails_on_one_rank(comm, subtests) -> None:
    for number in (5, 6):
        with subtests.test(number=number):
            assert comm.rank != 1 or number == 5, "only one of them"
    comm.barrier()


@pytest.mark.filterwarnings("default")
def test_warns_on_one_rank(comm) -> None:
    warnings.warn("said on every rank", stacklevel=1)
    if comm.rank == 1:
        warnings.warn("said on one", stacklevel=1)


async def test_async(comm) -> None:
    comm.barrier()


@pytest.mark.xfail(raises=KeyError)
def test_another_error_on_one_rank(comm) -> None:
    if comm.rank == 1:
        raise TypeError("not expected")
    raise KeyError


@pytest.mark.xfail(raises=KeyError, strict=True)
def test_expected_to_fail_on_one_rank(comm) -> None:
    if comm.rank == 2:
        raise KeyError
    comm.barrier()


@pytest.mark.xfail(strict=True)
def test_passes_unexpectedly(comm) -> None:
    comm.barrier()


@pytest.fixture
def broken(comm: ac.Communicator) -> None:
    if comm.rank == 1:
        raise OSError("a fixture of one rank")


def test_fixture_fails_on_one_rank(broken, comm) -> None:
    comm.barrier()


@pytest.fixture
def ends_badly(comm: ac.Communicator) -> Iterator[None]:
    yield
    if comm.rank == 1:
        raise OSError("the end of a fixture")


def test_end_of_a_fixture_fails_on_one_rank(ends_badly, comm) -> None:
    comm.barrier()


@only_processes
def test_others_are_in_init_when_a_rank_fails() -> None:
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
        raise LookupError("before init")
    ac.init()


@only_processes
def test_world_is_closed_by_a_failure() -> None:
    world = ac.init()
    if world.rank == 1:
        raise LookupError("of one process")
    world.barrier()


@only_processes
def test_world_is_fresh() -> None:
    assert ac.world().allreduce(1) == 3
    assert ac.init().size == 3


@pytest.mark.ranks(timeout=0.5)
def test_hangs_on_one_rank(comm) -> None:
    # A thread cannot be interrupted while it sleeps.
    while comm.rank == 1:
        time.sleep(60.0 if LAUNCHED else 0.01)
    comm.barrier()


@settings(database=None, max_examples=100)
@given(ranks=2, x=st.integers(0, 1000))
def test_law(comm, x) -> None:
    if comm.rank == 1:
        assert x < 10, "broken law"
    comm.barrier()


@settings(
    database=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ranks=2, x=st.integers())
def test_seed(comm, x, record_property) -> None:
    if comm.rank == 0:
        record_property("drawn", x)


def mpi_world() -> object:
    from mpi4py import MPI

    return MPI.COMM_WORLD


@only_processes
@settings(database=None, max_examples=100)
@given(ranks=[2, 3], world=mpi_world, x=st.integers(0, 1000))
def test_law_of_plain_mpi4py(comm, x) -> None:
    assert type(comm).__module__ == "mpi4py.MPI"
    total = comm.allreduce(x)
    if comm.rank == 1:
        assert total < 50


@only_processes
@settings(database=None, max_examples=100)
@given(ranks=2, world=mpi_world, x=st.integers(0, 1000))
def test_message_that_nobody_receives(comm, x) -> None:
    if comm.rank == 0 and x > 5:
        comm.send(None, dest=1, tag=4)


class OnSomeRanks:
    count = 0

    @given(x=st.booleans())
    def test_law_on_ranks_of_the_marker(self, comm, x) -> None:
        assert comm.size == self.count


TestOnTwo = pytest.mark.ranks(2)(type("TestOnTwo", (OnSomeRanks,), {"count": 2}))
TestOnThree = pytest.mark.ranks(3)(type("TestOnThree", (OnSomeRanks,), {"count": 3}))


@hypothesis.given(x=st.booleans())
def test_examples_of_each_rank(comm, x) -> None:
    raise AssertionError("it does not run")


class TestCase(unittest.TestCase):
    def test_method_of_a_test_case(self, comm) -> None:
        raise AssertionError("it does not run")

    @only_processes
    @pytest.mark.ranks(timeout=0.5)
    def test_interrupted_in_a_test_case(self) -> None:
        while ac.init().rank == 1:
            time.sleep(60.0)


@hypothesis.seed(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
class Machine(RuleBasedStateMachine):
    @rule(size=st.integers(1, 9))
    def calls(self, size: int) -> None:
        if LAUNCHED:
            ac.init().allreduce(np.zeros(size))


TestMachine = Machine.TestCase


@pytest.fixture
def fails_on_rank_1() -> None:
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "1")) == "1":
        raise OSError("a fixture without comm")


def test_fixture_without_comm_fails_on_one_rank(fails_on_rank_1, comm) -> None:
    comm.barrier()


def test_message_is_left(comm) -> None:
    comm.isend(1, (comm.rank + 1) % comm.size).wait()


@only_processes
def test_request_is_left(comm) -> None:
    comm.irecv((comm.rank + 1) % comm.size)


def test_request_that_nobody_waits_for_fails(comm) -> None:
    if comm.rank == 0:
        comm.iallreduce(1.0)


def test_waits_for_a_message_of_a_rank_that_fails(comm) -> None:
    if comm.rank == 1:
        raise ValueError("before it sends")
    comm.recv(1)


@only_processes
def test_waits_in_the_world_for_a_rank_that_fails() -> None:
    world = ac.init()
    if world.rank == 1:
        raise ValueError("before it sends")
    world.recv(1)


@only_processes
def test_waits_for_a_message_of_a_rank_that_has_ended(comm) -> None:
    if comm.rank != 1:
        comm.recv(1)


@only_processes
def test_communicators_were_given_back() -> None:
    from mpi4py import MPI

    made = []
    with contextlib.suppress(MPI.Exception):
        while len(made) < 2040:
            made.append(MPI.COMM_SELF.Dup())
    for comm in made:
        comm.Free()
    # MPICH has 2048; kept are those of the world, of the plugin, of laws, and of tests by size.
    assert len(made) >= 2034


def test_last(comm) -> None:
    assert comm.allreduce(1) == 3
