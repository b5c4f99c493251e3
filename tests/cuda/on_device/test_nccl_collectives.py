"""Collectives between devices by NCCL: every dtype, every reduction, groups, and what goes where.

Needs `mpiexec`; one rank alone shows little.
"""

from __future__ import annotations

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._dtypes import BY_NAME
from tests.cuda.on_device.test_collectives import rows
from tests.support import internals
from tests.support.on_ranks import each_rank_of
from tests.support.oracle import expected, same_result


@each_rank_of(by="nccl_job")
def test_arrays_go_over_nccl(comm, framework) -> None:
    x = framework.make(np.ones(1000, np.float32))
    comm.allreduce(x)
    assert internals.device_link(comm) is not None
    assert internals.device_link(comm).name == "nccl"
    said = ac.explain(x, comm=comm)
    assert (said.backend, said.copies) == ("nccl", 0)


@pytest.mark.parametrize("nbytes", [8, 4 << 10, (64 << 20) - 4, (64 << 20) + 4, 300 << 20])
@each_rank_of(by="nccl_job")
def test_long_arrays_go_in_chunks(comm, framework, nbytes) -> None:
    count = nbytes // 4
    x = (np.arange(count) % 251).astype(np.float32)
    got = framework.back(comm.allreduce(framework.make(x * (comm.rank + 1))))
    assert np.array_equal(got, x * sum(range(comm.size + 1)))


@pytest.mark.parametrize("op", ["sum", "prod", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "complex64", "bfloat16"])
@each_rank_of(by="nccl_job")
def test_an_order_of_nccls_own_gives_all_ranks_the_same(comm, framework, dtype, op) -> None:
    kind = BY_NAME[dtype].dtype
    with comm.dup(reproducible=False) as free:
        arrays = [(np.arange(9000) % 13 + rank + 1).astype(kind) for rank in range(comm.size)]
        got = framework.back(free.allreduce(framework.make(arrays[comm.rank]), op))
        # Numbers of which every order gives the same.
        assert same_result(got, expected(arrays, op), op)
        assert len(set(comm.allgather_object(got.tobytes()))) == 1


@each_rank_of(by="nccl_job")
def test_without_the_check_arrays_stay_on_the_device(comm, framework) -> None:
    x = rows(comm, 9000)
    with comm.dup(check=False) as unchecked:
        assert internals.device_link(unchecked) is not None
        got = unchecked.allreduce(framework.make(x))
        assert framework.back(got).tobytes() == comm.allreduce(x).tobytes()
