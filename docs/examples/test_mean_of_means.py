"""Ranks train as one process does: tests of `mean_of_means.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from mean_of_means import train, train_by_samples

import arraycomm as ac
from arraycomm.testing import given


class Mpi4py:
    """What the loop calls of an mpi4py communicator, over any ranks."""

    def __init__(self, comm: ac.Communicator) -> None:
        self.comm = comm

    def Get_rank(self) -> int:  # noqa: N802
        return self.comm.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.comm.size

    def Allreduce(self, sent: Any, received: Any) -> None:  # noqa: N802
        self.comm.allreduce(sent, out=received)


def check(train: Any, comm: ac.Communicator, samples: int, batch: int) -> None:
    x, y = np.arange(1.0, samples + 1)[:, None] / samples, np.arange(samples, 0.0, -1)
    ranks = comm.mpi_comm or Mpi4py(comm)
    alone = Mpi4py(comm.split(comm.rank))
    got = train(ranks, x, y, batch)
    want = train(alone, x, y, batch * comm.size)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-9, err_msg=name)


@given(samples=st.integers(1, 50), batch=st.integers(1, 8))
def test_ranks_train_as_one_process(comm, samples, batch):
    check(train, comm, samples, batch)


@given(samples=st.integers(1, 50), batch=st.integers(1, 8))
def test_every_sample_counts_alike(comm, samples, batch):
    check(train_by_samples, comm, samples, batch)
