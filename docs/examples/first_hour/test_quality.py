"""Tests of code that runs on ranks: a law, a mistake that it finds, and what becomes of a rank that does not call.

    python -m pytest test_quality.py                                    # ranks are threads: no launcher
    mpiexec -n 3 python -m pytest test_quality.py                       # ranks are processes
    python -m pytest --mpiexec 3 --junitxml report.xml test_quality.py  # the same: pytest starts them
    python -m pytest --mpiexec 3 --mpiexec-per test test_quality.py     # a job for each test: a crash ends one

It needs `pip install 'arraycomm[mpich,testing]' pytest`. It prints `6 passed, 1 xfailed`. To read the report of
the mistake, take away the mark `xfail`: it shows the smallest example, two ranks with the items [0, 1].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm.testing import given, per_rank, run

items = st.lists(st.integers(-50, 50), min_size=1, max_size=12)


def variance(comm: ac.Communicator, x: Any) -> float:
    """Return the variance of all ranks' numbers; a rank may have none."""
    count = comm.allreduce(len(x))
    mean = comm.allreduce(x.sum()) / count
    return comm.allreduce(((x - mean) ** 2).sum()) / count


def mistaken(comm: ac.Communicator, x: Any) -> float:
    """Do the same around this rank's own mean, which is a mistake."""
    mean = x.mean() if len(x) else 0.0
    return comm.allreduce(((x - mean) ** 2).sum()) / comm.allreduce(len(x))


# The number of ranks is drawn as well. Strategies are passed by name; comm is each rank's communicator.
@given(items=items)
def test_ranks_find_the_variance_of_one_process(comm, items):
    x = np.array(items, float)
    assert np.isclose(variance(comm, x[comm.rank :: comm.size]), x.var())


@pytest.mark.xfail(raises=AssertionError, strict=True, reason="a mean of each rank's own")
@given(items=items)
def test_the_law_finds_the_mistake(comm, items):
    x = np.array(items, float)
    assert np.isclose(mistaken(comm, x[comm.rank :: comm.size]), x.var())


@given(x=per_rank(st.floats(-1e6, 1e6)))
def test_every_rank_gets_the_same_bits(comm, x):
    assert len(set(comm.allgather_object(variance(comm, np.array([x]))))) == 1


# run starts ranks that are threads, also inside a rank of mpiexec.
def test_a_rank_that_does_not_call_is_named():
    def forgets(comm: ac.Communicator) -> None:
        if comm.rank != 1:
            comm.barrier()

    with pytest.raises(ac.PeerError, match="rank 1 has reached the end of its program"):
        run(3, forgets)


def test_ranks_that_receive_from_each_other_wait_until_the_timeout():
    # In a program it is half an hour, unless init(timeout=...) says otherwise.
    with pytest.raises(ac.CommTimeoutError, match=r"waiting in recv from rank \d with tag 0"):
        run(2, lambda comm: comm.recv(1 - comm.rank), timeout=1)


@pytest.mark.ranks(2, 3, timeout=30)
def test_calls_that_differ_are_shown(comm):
    with pytest.raises(ac.MismatchError, match=r"rank 0: allreduce\(sum\) float64 \(3,\)"):
        comm.allreduce(np.ones(3 + comm.rank))
