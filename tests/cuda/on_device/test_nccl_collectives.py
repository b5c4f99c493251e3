"""Collectives between devices by NCCL: every dtype, every reduction, groups, and what goes where.

Needs `mpiexec`; one rank alone shows little.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from tests.cuda.on_device.conftest import Framework, Job
from tests.cuda.on_device.test_collectives import rows
from tests.support import internals
from tests.support.oracle import CASES, DTYPES, IDS, expected, same_bits, same_result, sample

COUNTS = (1, 17, 40_000)


def test_arrays_go_over_nccl(nccl_job: Job, framework: Framework) -> None:
    def check(comm: Communicator) -> None:
        x = framework.make(np.ones(1000, np.float32))
        comm.allreduce(x)
        assert internals.device_link(comm) is not None
        assert internals.device_link(comm).name == "nccl"
        said = ac.explain(x, comm=comm)
        assert (said.backend, said.copies) == ("nccl", 0)

    nccl_job(check)


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=IDS)
def test_every_reduction_is_the_fold(nccl_job: Job, framework: Framework, dtype, op) -> None:
    def check(comm: Communicator) -> None:
        for count in COUNTS:
            arrays = [sample(dtype, count, rank, op) for rank in range(comm.size)]
            mine, want = framework.make(arrays[comm.rank]), expected(arrays, op)
            got = framework.back(comm.allreduce(mine, op))
            assert same_result(got, want, op)
            root = comm.size - 1
            reduced = comm.reduce(mine, op, root)
            assert (reduced is None) == (comm.rank != root)
            if reduced is not None:
                assert same_result(framework.back(reduced), want, op)
            scanned = framework.back(comm.scan(mine, op))
            assert same_result(scanned, expected(arrays[: comm.rank + 1], op), op)

    nccl_job(check)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_moved(nccl_job: Job, framework: Framework, dtype) -> None:
    def check(comm: Communicator) -> None:
        for count in COUNTS:
            arrays = [sample(dtype, count, rank) for rank in range(comm.size)]
            mine = framework.make(arrays[comm.rank])
            got = framework.back(comm.allgather(mine))
            assert got.tobytes() == np.stack(arrays).tobytes()
            got = framework.back(comm.bcast(mine, comm.size - 1))
            assert got.tobytes() == arrays[-1].tobytes()

    nccl_job(check)


@pytest.mark.parametrize("nbytes", [8, 4 << 10, (64 << 20) - 4, (64 << 20) + 4, 300 << 20])
def test_long_arrays_go_in_chunks(nccl_job: Job, framework: Framework, nbytes: int) -> None:
    def check(comm: Communicator) -> None:
        count = nbytes // 4
        x = (np.arange(count) % 251).astype(np.float32)
        got = framework.back(comm.allreduce(framework.make(x * (comm.rank + 1))))
        assert np.array_equal(got, x * sum(range(comm.size + 1)))

    nccl_job(check)


def test_integers_are_reduced_by_nccl_and_floats_are_not(nccl_job: Job) -> None:
    def check(comm: Communicator) -> None:
        link: Any = internals.device_link(comm)
        assert link.native("sum", np.dtype("int32"))
        assert not link.native("sum", np.dtype("float32"))
        assert not link.native("max", np.dtype("float64"))

    nccl_job(check)


@pytest.mark.parametrize("op", ["sum", "prod", "max", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "bfloat16", "float16"])
def test_an_order_of_nccls_own_gives_all_ranks_the_same(
    nccl_job: Job, framework: Framework, dtype: str, op: str
) -> None:
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if op == "max" and kind.kind == "c":
        pytest.skip("complex numbers have no order")

    def check(comm: Communicator) -> None:
        with comm.dup(reproducible=False) as free:
            arrays = [(np.arange(9000) % 13 + rank + 1).astype(kind) for rank in range(comm.size)]
            got = framework.back(free.allreduce(framework.make(arrays[comm.rank]), op))
            # Numbers of which every order gives the same.
            assert same_result(got, expected(arrays, op), op)
            assert len(set(comm.allgather_object(got.tobytes()))) == 1

    nccl_job(check)


def test_parts_and_duplicates_have_links_of_their_own(nccl_job: Job, framework: Framework) -> None:
    def check(comm: Communicator) -> None:
        x = framework.make(np.full(3000, comm.rank + 1, np.float32))
        for color in (comm.rank % 2, 0, None if comm.rank == 0 else 1):
            part = comm.split(color, -comm.rank)
            if part is None:
                continue
            with part:
                total = sum(rank + 1 for rank in part.allgather_object(comm.rank))
                for _ in range(2):
                    assert (framework.back(part.allreduce(x)) == total).all()
                assert internals.device_link(part) is not None
                assert internals.device_link(part) is not internals.device_link(comm)
        with comm.dup() as same:
            assert (framework.back(same.allreduce(x)) == sum(range(comm.size + 1))).all()
        assert (framework.back(comm.allreduce(x)) == sum(range(comm.size + 1))).all()

    nccl_job(check)


def test_calls_of_two_communicators_take_turns(nccl_job: Job, framework: Framework) -> None:
    def check(comm: Communicator) -> None:
        x = framework.make(rows(comm, 9000))
        want = comm.allreduce(rows(comm, 9000))
        with comm.dup() as other:
            results = [each.allreduce(x) for _ in range(20) for each in (comm, other)]
        assert all(framework.back(got).tobytes() == want.tobytes() for got in results)

    nccl_job(check)


def test_without_the_check_arrays_stay_on_the_device(nccl_job: Job, framework: Framework) -> None:
    def check(comm: Communicator) -> None:
        x = rows(comm, 9000)
        with comm.dup(check=False) as unchecked:
            assert internals.device_link(unchecked) is not None
            got = unchecked.allreduce(framework.make(x))
            assert framework.back(got).tobytes() == comm.allreduce(x).tobytes()

    nccl_job(check)


def test_uneven_rows_are_moved(nccl_job: Job, framework: Framework) -> None:
    def check(comm: Communicator) -> None:
        sizes = [0 if rank == 0 else 3000 * rank for rank in range(comm.size)]
        mine = np.full((sizes[comm.rank], 2), comm.rank, np.float32)
        got = framework.back(comm.allgatherv(framework.make(mine)))
        assert got[:, 0].tolist() == [r for r, count in enumerate(sizes) for _ in range(count)]
        counts = [rank * 1000 for rank in range(comm.size)]
        send = np.repeat(np.arange(comm.size, dtype=np.float32) + 10 * comm.rank, counts)
        got = framework.back(comm.alltoallv(framework.make(send), counts))
        want = [comm.rank + 10 * r for r in range(comm.size) for _ in range(counts[comm.rank])]
        assert got.tolist() == want

    nccl_job(check)


def test_what_another_rank_wrote_is_the_same_bits(nccl_job: Job, framework: Framework) -> None:
    def check(comm: Communicator) -> None:
        x = sample(np.dtype(np.float32), 100_003, comm.rank)
        got = framework.back(comm.allreduce(framework.make(x)))
        for other in comm.allgather_object(got.tobytes()):
            assert same_bits(np.frombuffer(other, np.float32), got)
            assert other == got.tobytes()

    nccl_job(check)
