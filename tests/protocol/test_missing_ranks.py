"""Ranks that wait in vain say who is missing, and where that rank was last seen."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from tests.support import internals
from tests.support.on_ranks import each_rank_of


@each_rank_of(3)
def test_rank_that_never_comes_is_named(comm: Communicator) -> None:
    impatient = comm.dup(timeout=0.8)
    impatient.allreduce(np.ones(2))
    if comm.rank == 0:
        time.sleep(1.2)
        comm.barrier()
        return
    with pytest.raises(ac.CommTimeoutError, match=r"timeout 0\.8 s") as caught:
        impatient.barrier()
    assert "rank 0 is missing: it was last seen in allreduce" in str(caught.value)
    assert str(caught.value).count("is missing") == 1
    with pytest.raises(ac.CommunicatorClosedError, match="CommTimeoutError"):
        impatient.barrier()
    comm.barrier()


@each_rank_of(3)
def test_ranks_that_wait_on_different_communicators_learn_of_one_another(
    comm: Communicator,
) -> None:
    """Each timeout tells where the rank that is missing waits, also in a message."""
    # They time out before it is certain that they wait for one another.
    first, second = comm.dup(timeout=0.9), comm.dup(timeout=0.9)
    calls = [lambda: first.allreduce(np.ones(3)), second.barrier, lambda: second.recv(0, 5)]
    with pytest.raises(ac.CommTimeoutError) as caught:
        calls[comm.rank]()
    said, waits = str(caught.value), "(it )?(is waiting|has waited in vain)"
    site = rf"at test_missing_ranks\.py:\d+, step 1 of {re.escape(internals.name(second))}"
    if comm.rank == 0:
        assert re.search(rf"rank 1 is missing: {waits} in barrier {site}", said), said
        assert re.search(rf"rank 2 is missing: {waits} in recv from rank 0 with", said), said
    else:
        site = rf"at test_missing_ranks\.py:\d+, step 1 of {re.escape(internals.name(first))}"
        assert re.search(rf"rank 0 .*{waits} in allreduce {site}", said), said
    comm.barrier()


@each_rank_of(2)
def test_a_rank_whose_argument_is_wrong_waits_in_that_call(comm: Communicator) -> None:
    other = comm.dup(timeout=20)
    other.barrier()
    if comm.rank == 0:
        with pytest.raises(TypeError):
            other.allreduce(object())
    else:
        with pytest.raises(
            ac.CommTimeoutError, match="rank 0 is waiting in allreduce at test_miss"
        ):
            other.recv(0, timeout=1)
    comm.barrier()


def test_ranks_that_time_out_later_are_told_without_a_gap(on_ranks) -> None:
    """They may look at any moment: what a rank waits in becomes what it waited in, and never nothing."""

    def check(comm: Communicator) -> None:
        other = comm.dup(timeout=0.5)
        if comm.rank > 0:
            with pytest.raises(ac.CommTimeoutError):
                other.barrier()
            before, after = waits_of(other)
            assert before.startswith("is waiting in barrier at ")
            assert after.startswith("has waited in vain in barrier at ")
        comm.barrier()

    with internals.noted_waits() as waits_of:
        on_ranks(3, check)


@each_rank_of(2)
def test_what_a_rank_waited_in_is_forgotten_when_it_returns(comm: Communicator) -> None:
    other = comm.dup(timeout=0.7)
    if comm.rank == 0:
        comm.barrier()
        time.sleep(1.2)
    else:
        time.sleep(0.4)
        comm.barrier()
        with pytest.raises(ac.CommTimeoutError, match="it was in no collective so far"):
            other.barrier()
    comm.barrier()


LATE = {
    "free": lambda part: part.free(),
    "dup": lambda part: part.dup(),
    "a large allreduce": lambda part: part.allreduce(np.ones(300_000)),
    "a request": lambda part: part.iallreduce(1.0).wait(),
}


@pytest.mark.parametrize("late", LATE)
@each_rank_of(3)
def test_rank_that_comes_once_others_have_given_up_is_told(comm: Communicator, late: str) -> None:
    """It need not wait as long as they did, and what it left half done ends nothing else."""
    part = comm.dup(timeout=100)
    if comm.rank != 1:
        with pytest.raises(ac.CommTimeoutError, match="rank 1 is missing"):
            part.barrier(timeout=0.5)
    comm.barrier()
    if comm.rank == 1:
        begun = time.monotonic()
        with pytest.raises((ac.PeerError, ac.MismatchError)) as caught:
            LATE[late](part)
        assert time.monotonic() - begun < 30
        assert "timeout 0.5 s" in str(caught.value) or "barrier" in str(caught.value)
    part.free()
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_rank_that_waits_beside_one_that_gives_up_times_out_itself(comm: Communicator) -> None:
    part = comm.dup(timeout=100)
    if comm.rank == 1:
        with pytest.raises(ac.CommTimeoutError, match=r"timeout 1\.5 s"):
            part.barrier(timeout=1.5)
    elif comm.rank == 2:
        with pytest.raises(ac.CommTimeoutError, match=r"timeout 0\.5 s"):
            part.recv(0, 5, timeout=0.5)
    comm.barrier()
