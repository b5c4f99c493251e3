from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._dtypes import BY_NAME
from arraycomm.adapters.numpy import SGD
from tests.adapters.arrays import MAKERS, elements
from tests.adapters.remote import Remote
from tests.support.on_ranks import alone, each_rank_of


@each_rank_of("size")
def test_without_anyone_out_of_data_the_bits_are_those_of_the_plain_mean(
    comm: Communicator,
) -> None:
    random = np.random.default_rng(comm.rank)
    mine = {"w": random.random((3, 2), np.float32), "b": [random.random(4)]}
    want = ac.allreduce_gradients(mine, comm=comm)
    with ac.join(comm):
        got = ac.allreduce_gradients(mine, comm=comm)
    assert got["w"].tobytes() == want["w"].tobytes()
    assert got["b"][0].tobytes() == want["b"][0].tobytes()


@each_rank_of("several")
def test_sums_missing_gradients_and_large_trees(comm: Communicator) -> None:
    with ac.join(comm):
        if comm.rank:
            tree = {
                "large": np.full(300_000, 2.0, np.float32),
                "here": np.full(3, comm.rank, np.float16) if comm.rank == 1 else None,
                "nowhere": None,
            }
            got = ac.allreduce_gradients(tree, "sum", comm=comm)
            assert (got["large"] == 2 * (comm.size - 1)).all()
            assert got["here"].dtype == np.float16
            assert got["here"].tolist() == [1.0] * 3
            assert got["nowhere"] is None
            got = ac.allreduce_gradients(tree, compression="bfloat16", comm=comm)
            assert got["large"].dtype == np.float32
            assert (got["large"] == 2).all()


@pytest.mark.parametrize(
    ("framework", "dtype", "op"),
    [
        *(("numpy", "complex64", "mean"), ("numpy", "float32", "sum"), ("jax", "float32", "mean")),
        *(("torch", "bfloat16", "mean"), ("torch", "complex64", "sum"), ("jax", "bfloat16", "sum")),
        *(("remote", "float16", "mean"), ("remote", "float32", "sum")),
    ],
)
def test_weighted_gradients_have_the_same_bits_in_every_framework(
    on_ranks, several, framework, dtype, op
) -> None:
    dtype = BY_NAME[dtype].dtype
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype

    def drawn(rank: int) -> Any:
        parts = np.random.default_rng(rank).standard_normal((2, 7)).astype(np.float32)
        return (parts[0] + 1j * parts[1] if dtype.kind == "c" else parts[0]).astype(dtype)

    def times(array: Any, factor: float) -> Any:
        return (array.astype(wide).view(np.float32) * np.float32(factor)).view(wide)

    weights = [0.3 + rank for rank in range(several)]
    want = sum(times(drawn(rank), weights[rank] if op == "mean" else 1) for rank in range(several))
    if op == "mean":
        want = (want.view(np.float32) / np.float32(sum(weights))).view(wide)

    def check(comm: Communicator) -> None:
        with ac.join(comm) as joined:
            joined.weight = weights[comm.rank]
            tree = {"w": MAKERS[framework](drawn(comm.rank)), "n": None}
            got = ac.allreduce_gradients(tree, op, comm=comm)
        assert got["n"] is None
        assert type(got["w"]) is type(tree["w"])
        assert elements(got["w"]).dtype == dtype
        assert elements(got["w"]).tobytes() == want.astype(dtype).tobytes()

    on_ranks(several, check)


def test_weights_are_applied_where_gradients_are(on_ranks, several) -> None:
    """The host reads w·g alone."""

    def check(comm: Communicator) -> None:
        with ac.join(comm) as joined:
            joined.weight = 3
            gradient = Remote([comm.rank + 1.0, -2.0])
            ac.allreduce_gradients(gradient, comm=comm)
        seen = [array.tolist() for array in Remote.seen]
        assert [3.0 * (comm.rank + 1), -6.0] in seen
        assert [comm.rank + 1.0, -2.0] not in seen

    Remote.seen.clear()
    on_ranks(several, check)


@pytest.mark.parametrize("value", [1.5, 2j, np.float32(4)])
@each_rank_of("several")
def test_weighted_numbers_come_back_as_what_they_are(comm: Communicator, value) -> None:
    with ac.join(comm) as joined:
        joined.weight = 2
        got = ac.allreduce_gradients([value, value], comm=comm)
        assert [type(x) for x in got] == [type(value)] * 2
        assert got == [value, value]


@each_rank_of("size")
def test_where_no_weight_is_left_gradients_are_zeros(comm: Communicator) -> None:
    with ac.join(comm) as joined:
        joined.weight = 0
        if comm.rank == 0:
            got = ac.allreduce_gradients(np.full(3, np.nan), comm=comm)
            assert got.tolist() == [0.0] * 3


@each_rank_of("several")
def test_metrics_are_shadowed_too(comm: Communicator) -> None:
    with ac.join(comm):
        for step in range(comm.rank):
            metrics = {"loss": 1.0 + comm.rank, "z": 1j, "n": None, "a": np.arange(6000)}
            got = ac.mean_metrics(metrics, comm.rank + 1, comm=comm)
            live = range(step + 1, comm.size)
            want = sum((r + 1) * (1.0 + r) for r in live) / sum(r + 1 for r in live)
            assert math.isclose(got["loss"], want, rel_tol=1e-15)
            assert got["z"] == 1j
            assert got["n"] is None
            assert np.allclose(got["a"], np.arange(6000), rtol=1e-15, atol=0)


@each_rank_of("several")
def test_a_block_that_is_entered_again_has_its_own_last_step(comm: Communicator) -> None:
    joined = ac.join(comm)
    for batches in (comm.size - comm.rank, comm.rank + 1):
        with joined:
            for _ in range(batches):
                ac.allreduce_gradients(np.ones(1), comm=comm)
    assert joined.synchronize(comm.rank) == comm.size - 1


@alone
@each_rank_of("size", "torch")
def test_no_weight_leaves_torch_parameters_untouched(comm: Communicator, torch: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0, weight_decay=0.5)
    ac.DistributedOptimizer(optimizer, comm=comm)
    with ac.join(comm) as joined:
        joined.weight = 0
        if comm.rank == 0:
            weight.grad = torch.ones(3)
            optimizer.step()
    assert weight.tolist() == [1.0] * 3


@pytest.mark.parametrize("shadows", [False, True])
@pytest.mark.parametrize("wrong", ["exception", "other", "nested"])
@each_rank_of("several")
def test_what_is_wrong_in_one_block_raises_in_all(comm: Communicator, wrong, shadows) -> None:
    def block() -> None:
        with ac.join(comm):
            if shadows and comm.rank == 0:
                return
            ac.allreduce_gradients(np.ones(2), comm=comm)
            if comm.rank != 1:
                ac.allreduce_gradients(np.ones(2), comm=comm)
            elif wrong == "exception":
                error = KeyError("no such batch of join")
                raise error from error
            elif wrong == "other":
                comm.allreduce(1.0)
            else:
                ac.join(comm).__enter__()

    mine = comm.rank == 1
    error = KeyError if wrong == "exception" else RuntimeError
    error = error if mine else ac.PeerError
    with pytest.raises(error, match=r"join|allreduce_gradients") as caught:
        block()
    assert mine or caught.value.rank == 1
    assert comm.allreduce(1) == comm.size


@alone
@each_rank_of("several", "torch")
def test_an_error_of_a_step_taken_without_data_raises_in_all(
    comm: Communicator, torch: Any
) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = ac.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), comm=comm)
    optimizer.register_step_post_hook(lambda *_: 1 / comm.rank)

    def block() -> None:
        with ac.join(comm):
            for _ in range(3 * comm.rank):
                weight.sum().backward()
                optimizer.step()

    with pytest.raises(ac.PeerError if comm.rank else ZeroDivisionError):
        block()
    assert comm.allreduce(1) == comm.size


@each_rank_of("several")
def test_an_error_that_the_block_handles_is_over(comm: Communicator) -> None:
    with ac.join(comm):
        with pytest.raises((RuntimeError, ac.PeerError)):
            comm.barrier() if comm.rank == 0 else ac.allreduce_gradients(np.ones(2), comm=comm)
        assert ac.allreduce_gradients(np.ones(2), comm=comm).tolist() == [1.0, 1.0]


@each_rank_of(3)
def test_trees_that_differ_raise_in_all_blocks(comm: Communicator) -> None:
    def block() -> None:
        with ac.join(comm):
            if comm.rank:
                tree = {"a" if comm.rank == 1 else "b": np.ones(2)}
                ac.allreduce_gradients(tree, comm=comm)

    with pytest.raises(ac.MismatchError, match=r"tree\['a'\]"):
        block()


@each_rank_of("several")
def test_ranks_that_enter_no_block_are_told_apart(comm: Communicator) -> None:
    with pytest.raises(ac.MismatchError, match="join"):
        ac.join(comm).__enter__() if comm.rank else comm.barrier()


@each_rank_of("several")
def test_accumulation_is_refused(comm: Communicator) -> None:
    optimizer = ac.DistributedOptimizer(SGD(), comm=comm, accumulate=2)

    def block() -> None:
        with ac.join(comm):
            if comm.rank:
                optimizer.update(np.zeros(1), np.ones(1))

    with pytest.raises(ValueError if comm.rank else ac.PeerError, match="accumulate"):
        block()


@each_rank_of("size")
def test_a_communicator_made_before_is_free(comm: Communicator) -> None:
    with comm.dup() as other, ac.join(comm):
        assert other.allreduce(1) == comm.size
        assert ac.allreduce_gradients(np.ones(1), comm=comm).tolist() == [1.0]
