"""Collectives of arrays on a device: results come back there, in the order of its streams.

Run on a machine with a GPU by `python -m pytest tests/gpu`; skipped without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.testing import run
from tests.collectives.oracle import expected, same_bits, sample

Make = Callable[[np.ndarray[Any, Any]], Any]
Back = Callable[[Any], np.ndarray[Any, Any]]


def _cupy() -> tuple[Make, Back]:
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.Device(0).use()
    except cupy.cuda.runtime.CUDARuntimeError:
        pytest.skip("no CUDA device")
    return cupy.asarray, cupy.asnumpy


def _torch() -> tuple[Make, Back]:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return lambda a: torch.from_numpy(a.copy()).cuda(), lambda t: t.cpu().numpy()


def _jax() -> tuple[Make, Back]:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    return jax.numpy.array, np.asarray


@pytest.fixture(params=[_cupy, _torch, _jax], ids=["cupy", "torch", "jax"])
def framework(request: pytest.FixtureRequest) -> tuple[Make, Back]:
    return request.param()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "complex64"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_allreduce_on_the_device_is_the_fold(framework, size, dtype) -> None:
    make, back = framework

    def check(comm: ac.Communicator) -> None:
        for count in (5, 40_000):
            arrays = [sample(np.dtype(dtype), count, rank) for rank in range(comm.size)]
            mine = make(arrays[comm.rank])
            for _ in range(2):
                got = comm.allreduce(mine)
                assert type(got) is type(mine)
                some = slice(0, 50)
                want = expected([a[some] for a in arrays], "sum")
                assert same_bits(back(got)[some].copy(), want)
            assert same_bits(back(mine), arrays[comm.rank])

    run(size, check)


@pytest.mark.parametrize("size", [2, 3])
def test_host_and_device_arrays_meet(framework, size) -> None:
    make, back = framework

    def check(comm: ac.Communicator) -> None:
        x = np.full(1000, comm.rank + 1, np.float32)
        got = comm.allreduce(make(x) if comm.rank else x)
        assert type(got) is (type(make(x)) if comm.rank else np.ndarray)
        assert ((back(got) if comm.rank else got) == sum(range(size + 1))).all()

    run(size, check)


@pytest.mark.parametrize("size", [1, 2])
def test_bcast_and_allgather_stay_on_the_device(framework, size) -> None:
    make, back = framework

    def check(comm: ac.Communicator) -> None:
        mine = make(np.full((2, 3), comm.rank, np.float32))
        assert (back(comm.bcast(mine, comm.size - 1)) == comm.size - 1).all()
        got = comm.bcast(mine if comm.rank == 0 else None, 0, like=mine)
        assert type(got) is type(mine)
        stacked = comm.allgather(mine)
        assert type(stacked) is type(mine)
        assert back(stacked)[:, 0, 0].tolist() == list(range(comm.size))

    run(size, check)


def test_out_on_the_device_is_written(framework) -> None:
    make, back = framework

    def check(comm: ac.Communicator) -> None:
        x = make(np.full(1000, 2, np.float32))
        out = make(np.zeros(1000, np.float32))
        if type(x).__module__.startswith("jax"):
            with pytest.raises(BufferError, match="immutable"):
                comm.allreduce(x, out=out)
            return
        assert comm.allreduce(x, out=out) is out
        assert (back(out) == 2 * comm.size).all()

    run(2, check)


def test_work_queued_before_and_after_is_in_order(framework) -> None:
    """The input is the result of a long kernel that has only been queued."""
    make, back = framework

    def check(comm: ac.Communicator) -> None:
        a = make(np.full((3000, 3000), 1 / 3000, np.float32))
        for _ in range(20):
            a = a @ a
        got = comm.allreduce(a) + 1
        assert np.allclose(back(got), comm.size / 3000 + 1, rtol=1e-3)

    run(2, check)


def test_trees_stay_on_the_device(framework) -> None:
    make, back = framework

    def check(comm: ac.Communicator) -> None:
        mine = {"device": make(np.full(7, comm.rank, np.float32)), "host": np.full(3, comm.rank)}
        got = ac.allreduce_tree(mine, "sum", comm=comm)
        assert type(got["device"]) is type(mine["device"])
        assert (back(got["device"]) == 1).all()
        assert (got["host"] == 1).all()
        same = ac.synchronize(mine, root=1, comm=comm)
        assert (back(same["device"]) == 1).all()

    run(2, check)
