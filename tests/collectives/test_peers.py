"""What other systems get wrong with arrays in host memory, one test for each case: right here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._training.batches.data import DistributedDataContainer
from tests.support import internals
from tests.support.on_ranks import each_rank_of

SIZES = [3, 20_000]


@each_rank_of(3, "torch")
def test_sum_of_torch_bfloat16_ones_is_no_sum_of_bytes(comm: Communicator, torch) -> None:
    """mpi4py with Open MPI: -0.0625."""
    for count in SIZES:
        x = torch.ones(count, dtype=torch.bfloat16)
        assert (comm.allreduce(x) == 3).all()
        assert (comm.scan(x) == comm.rank + 1).all()


@each_rank_of(3)
def test_c_order_on_one_rank_and_fortran_order_on_another(comm: Communicator) -> None:
    """mpi4py: wrong sums."""
    for rows in (2, 200):
        x = np.arange(rows * 300).reshape(rows, 300)
        mine = np.asfortranarray(x) if comm.rank % 2 else x
        assert np.array_equal(comm.allreduce(mine), x * comm.size)
        assert np.array_equal(comm.allgatherv(mine), np.concatenate([x] * comm.size))


@each_rank_of(3, "jax")
def test_arrays_of_jax_and_bfloat16_are_sent(comm: Communicator, jax) -> None:
    """mpi4py: KeyError '=f', or an invalid capsule; BufferError."""
    for count in SIZES:
        got = comm.bcast(jax.numpy.full(count, 2.5) if comm.rank == 0 else None)
        assert got.tolist() == [2.5] * count
        x = np.full(count, 1.5, ml_dtypes.bfloat16)
        got = comm.bcast(x if comm.rank == 0 else None)
        assert (got.dtype, got.tobytes()) == (x.dtype, x.tobytes())


@each_rank_of(3)
def test_narrow_floats_need_no_dtype_of_the_transport_and_are_no_integers(
    comm: Communicator,
) -> None:
    """mpi4py: MPI.BFLOAT16_T is null, and passing it aborts; HeAT: adds the bit patterns as int16."""
    for count, dtype in product(SIZES, (np.float16, ml_dtypes.bfloat16)):
        for op in ("sum", "mean", "prod", "min", "max"):
            got = comm.reduce_scatter(np.ones((comm.size, count), dtype), op)
            assert (got == (comm.size if op == "sum" else 1)).all(), op
        x = np.full(count, 0.5 + comm.rank, dtype)
        assert (comm.allreduce(x).astype(float) == comm.size**2 / 2).all()


@each_rank_of(3)
def test_nan_shows_whichever_rank_holds_it(comm: Communicator) -> None:
    """MPICH, Open MPI, gloo, MLX, NCCL: it depends on the rank."""
    for holder, count, op in product(range(comm.size), SIZES, ("min", "max")):
        x = np.full(count, np.nan if comm.rank == holder else comm.rank, np.float32)
        assert np.isnan(comm.allreduce(x, op)).all(), (holder, op)


@each_rank_of(3, "torch")
def test_sliced_tensor_is_reduced_in_all_its_elements(comm: Communicator, torch) -> None:
    """torch gloo: half of them wrong."""
    for count in SIZES:
        memory = torch.arange(2.0 * count)
        x = memory[::2]
        assert torch.equal(comm.allreduce(x), x * comm.size)
        assert comm.allreduce(x, out=x) is x
        assert torch.equal(memory[::2], torch.arange(0, 2.0 * count, 2) * comm.size)
        assert torch.equal(memory[1::2], torch.arange(1, 2.0 * count, 2))
        # nccl4py does not look at strides.
        x = memory.reshape(count, 2).T
        assert torch.equal(comm.allgather(x), torch.stack([x] * comm.size))


@each_rank_of(3)
def test_shapes_of_as_many_elements_are_a_mismatch(comm: Communicator) -> None:
    """torch gloo: accepted."""
    with pytest.raises(ac.MismatchError, match=r"\(2, 3\).*\(6,\)"):
        comm.allreduce(np.ones((2, 3) if comm.rank == 0 else 6))


@each_rank_of(3)
def test_bfloat16_sum_is_not_rounded_at_every_hop(comm: Communicator) -> None:
    """gloo, NCCL, Horovod, MLX: 256 + 1 + 1 = 256."""
    for count in SIZES:
        x = np.full(count, 1 if comm.rank else 256, ml_dtypes.bfloat16)
        assert (comm.allreduce(x).astype(int) == 258).all()


@each_rank_of(3)
def test_bool_has_no_sum_but_or(comm: Communicator) -> None:
    """nccl4py: True + True is 2."""
    for count in SIZES:
        x = np.ones(count, bool)
        with pytest.raises(TypeError, match='use "or"'):
            comm.allreduce(x)
        assert comm.allreduce(x, "or").view(np.uint8).tolist() == [1] * count


@each_rank_of(3)
def test_complex_numbers_are_no_pairs_of_reals(comm: Communicator) -> None:
    """pylops-mpi over NCCL: product and maximum of the parts."""
    for count in SIZES:
        x = np.full(count, 1j, np.complex64)
        assert (comm.allreduce(x, "prod") == np.complex64(1j) ** comm.size).all()
        with pytest.raises(TypeError, match="no order"):
            comm.allreduce(x, "max")


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_negative_strides_reach_a_framework(on_ranks, framework) -> None:
    """torch.from_dlpack of such an array: the process aborts."""
    pytest.importorskip(framework)

    def check(comm: Communicator) -> None:
        for count in SIZES:
            x = np.arange(count, dtype=np.float32)[::-1]
            like = ac.exchange(x, framework)
            got = comm.bcast(x if comm.rank == 0 else None, like=like)
            assert np.asarray(got).tolist() == x.tolist()

    on_ranks(3, check)


@each_rank_of(3, "jax", "torch")
def test_jax_array_is_not_changed_through_what_came_of_it(comm: Communicator, jax, torch) -> None:
    """torch.from_dlpack(jax_array), then a write: changes the array."""
    for count in SIZES:
        x = jax.numpy.ones(count)
        for got in (ac.exchange(x, "torch"), comm.scan(ac.exchange(x, torch.ones(1)))):
            got.fill_(7)
        with pytest.raises(BufferError, match="immutable"):
            comm.alltoallv(np.ones(1, np.float32), [1] + [0] * (comm.size - 1), out=x)
        assert (np.asarray(x) == 1).all()


def test_five_items_on_four_ranks(on_ranks) -> None:
    """FluxMPI, Lux: BoundsError on the last rank, the others hang."""

    def check(comm: Communicator) -> list[int]:
        return [int(item) for item in DistributedDataContainer(np.arange(5), comm=comm)]

    parts = on_ranks(4, check)
    assert sorted(item for part in parts for item in part) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fails", [lambda: 1 / 0, lambda: np.ones(2)[3]], ids=["1/0", "index"])
@each_rank_of(3)
def test_rank_that_fails_alone_ends_the_wait_of_the_others(
    comm: Communicator, fails: Callable[[], Any]
) -> None:
    """All test plugins: the others hang."""
    inner = comm.dup()
    if comm.rank == 0:
        with pytest.raises((ZeroDivisionError, IndexError)), inner:
            fails()
    elif internals.control(inner).shared:
        with pytest.raises(ac.PeerError, match="rank 0 failed"):
            inner.alltoall(np.ones((comm.size, 9_000)))
    comm.barrier()
