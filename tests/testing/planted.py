"""Tests with a planted fault each, which `test_given.py` runs in processes of their own."""

from __future__ import annotations

import ctypes
import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from arraycomm.testing import given, per_rank
from arraycomm.testing import strategies as ranked
from arraycomm.testing._ranks import threads as _threads

# Explaining a failure takes longer than finding it, and says nothing about ranks; neither does the
# search for a second fault, of which most tests have none.
hypothesis.settings.register_profile(
    "planted",
    deadline=None,
    # A fault ends the search, so that many examples take no longer; few may not meet it.
    max_examples=200,
    database=None,
    report_multiple_bugs=False,
    phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
)
hypothesis.settings.load_profile("planted")
SEVERAL_FAULTS = hypothesis.settings(max_examples=200, report_multiple_bugs=True)

numbers = st.integers(0, 300)
# For failures that each take the time of a wait in vain.
few = st.integers(0, 2)


@given(x=numbers)
def test_before_a_collective(comm, x) -> None:
    if comm.rank == 1 and x > 100:
        raise ValueError("planted before")
    comm.allreduce(x)


@given(x=numbers)
def test_inside_a_collective(comm, x) -> None:
    comm.allreduce({} if comm.rank == 1 and x > 100 else x)


@given(x=numbers)
def test_between_collectives(comm, x) -> None:
    comm.allreduce(x)
    if comm.rank == comm.size - 1 and x > 100 and comm.size > 1:
        raise ValueError("planted between")
    comm.barrier()


@given(x=numbers)
def test_after_a_collective(comm, x) -> None:
    total = comm.allreduce(x)
    assert comm.rank == 0 or total <= 100 * comm.size


@given(x=numbers)
def test_on_every_rank(comm, x) -> None:
    assert comm.allreduce(x) <= 100 * comm.size


@given(x=numbers)
def test_mismatch(comm, x) -> None:
    comm.allreduce(x, "max" if comm.rank == 1 and x > 100 else "min")


@given(x=numbers)
def test_one_call_more(comm, x) -> None:
    comm.barrier()
    if comm.rank == 1 and x > 100:
        comm.barrier()


@SEVERAL_FAULTS
@given(x=few, timeout=0.5)
def test_one_call_less(comm, x) -> None:
    part = comm.split(comm.rank % 2)
    part.allreduce(x)
    if comm.rank != 1 or x < 1:
        comm.allreduce(x)
    part.barrier()


@given(x=numbers)
def test_failure_in_a_part_of_the_ranks(comm, x) -> None:
    part = comm.split(0 if comm.rank < 2 else 1)
    if part.rank == 1 and x > 100:
        raise ValueError("planted in a part")
    part.allreduce(np.ones(50_000))
    comm.barrier()


@given(x=few)
def test_requests_outstanding(comm, x) -> None:
    requests = [comm.iallreduce(np.ones(n)) for n in (3, 50_000)]
    if comm.rank == 1 and x > 0:
        raise ValueError("planted under way")
    for request in requests:
        request.wait()


# A duplicate is made in less than a second on a busy machine too. There is nothing to shrink.
@hypothesis.settings(phases=["generate"])
@given(ranks=2, x=st.booleans(), timeout=1.0)
def test_deadlock(comm, x) -> None:
    other = comm.dup()
    if x:
        (other if comm.rank == 1 else comm).barrier()


@hypothesis.settings(phases=["generate"])
@given(ranks=2, timeout=0.5)
def test_stuck_in_python(comm) -> None:
    while comm.rank == 1:
        time.sleep(0.001)
    comm.barrier()


@pytest.fixture
def short_patience(monkeypatch) -> None:
    """Wait in vain for a shorter time than usual; nothing else depends on it."""
    monkeypatch.setattr(_threads, "HOPELESS", 0.5)


@pytest.mark.usefixtures("short_patience")
@hypothesis.settings(phases=["generate"])
@given(ranks=2, timeout=0.5)
def test_stuck_outside_python(comm) -> None:
    if comm.rank == 1:
        ctypes.CDLL(None).pause() if comm.backend == "mpi" else time.sleep(60)
    comm.barrier()


@SEVERAL_FAULTS
@given(x=numbers)
def test_two_faults(comm, x) -> None:
    if comm.rank == 1 and 0 < x < 20:
        raise KeyError("the first")
    if comm.rank == 1 and x >= 20:
        raise IndexError("the second")
    comm.barrier()


def _local_error() -> type[Exception]:
    class UnheardOfError(Exception):
        def __init__(self, a, b) -> None:
            super().__init__(f"{a}{b}")

    return UnheardOfError


@given(ranks=2)
def test_error_that_cannot_be_sent(comm) -> None:
    if comm.rank == 1:
        raise _local_error()("quite ", "unheard of")
    comm.barrier()


@given(x=per_rank(numbers))
def test_notes_and_assumptions(comm, x) -> None:
    hypothesis.note(f"mine is {x}")
    hypothesis.target(float(x), label="size")
    hypothesis.assume(x % 2 == 0)
    assert comm.allreduce(x, "max") <= 100


@given(ranks=2)
def test_events(comm) -> None:
    hypothesis.event(f"rank {comm.rank} was here")


@given(data=st.data())
def test_draws_in_step(comm, data) -> None:
    first = data.draw(numbers, label="first")
    assert comm.allreduce(first, "min") == comm.allreduce(first, "max")
    mine = data.draw(per_rank(st.integers(0, 5)), label="mine")
    second = data.draw(st.integers(0, first))
    comm.barrier()
    assert comm.rank == 0 or first <= 100, (mine, second)


@given(x=ranked.arrays(dtypes="float32", shapes=(3, 4), layouts="negative", frameworks="numpy"))
def test_negative_strides_arrive(comm, x) -> None:
    assert comm.allgather_object(x.strides) == [(-16, -4)] * comm.size
    assert comm.size < 2, "they are negative on every rank"


@given(ranks=st.integers(1, 8))
def test_as_many_ranks_as_there_are(comm) -> None:
    assert comm.size < 3


@given(ranks=[64])
def test_more_ranks_than_there_are(comm) -> None:
    assert comm.size == 64


@given(x=numbers)
def test_skip_on_one_rank(comm, x) -> None:
    if comm.rank == comm.size - 1:
        pytest.skip("not here")
    comm.barrier()


@given(ranks=2, x=numbers)
def test_failure_beside_a_skip(comm, x) -> None:
    if comm.rank == 0:
        pytest.skip("not here either")
    raise ValueError("planted beside a skip")


@hypothesis.settings(max_examples=5)
@hypothesis.example(x=7)
@hypothesis.example(x=8, ranks=1)
@given(x=st.just(0))
def test_explicit_examples(comm, x) -> None:
    hypothesis.note(f"{x} on {comm.size}")
    assert x != 7 or comm.rank == 0


class TestMethods:
    @pytest.mark.parametrize("limit", [10, 20])
    @given(x=numbers)
    def test_method(self, comm, x, limit, tmp_path_factory) -> None:
        assert tmp_path_factory is not None
        assert comm.allreduce(x, "max") <= limit


@pytest.fixture(scope="module")
def fails_on_rank_1() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        raise RuntimeError("the fixture failed")


@pytest.mark.usefixtures("fails_on_rank_1")
@given()
def test_a_fixture_failed(comm) -> None:
    comm.barrier()


@given()
def test_after_it(comm) -> None:
    comm.barrier()


@given()
def test_in_step_again(comm) -> None:
    comm.barrier()
