from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._dtypes import BY_NAME
from tests.adapters.arrays import MAKERS, elements
from tests.adapters.remote import Remote
from tests.support.on_ranks import SIZES, alone

# How many batches each rank has.
BATCHES = [
    batches
    for batches in [*((3,), (3, 1), (0, 2), (5, 0, 1), (0, 0, 0), (3, 1, 0, 2), (0, 0, 0, 3))]
    if len(batches) in SIZES
]


def _gradient(rank: int, step: int) -> dict[str, Any]:
    rng = np.random.default_rng((rank, step))
    return {"w": rng.standard_normal((3, 2)).astype(np.float32), "b": [rng.standard_normal(4)]}


def _mean(batches: tuple[int, ...], size: int, step: int, weights: Any = None) -> Any:
    """What a step gives: the mean over the ranks that have a batch, by their weights."""
    live = [rank for rank in range(size) if step < batches[rank]]
    count = {rank: 1.0 if weights is None else weights[rank] for rank in live}
    total = sum(count.values())
    return {
        "w": sum(count[r] * _gradient(r, step)["w"].astype(np.float64) for r in live) / total,
        "b": [sum(count[r] * _gradient(r, step)["b"][0] for r in live) / total],
    }


def _close(got: Any, want: Any) -> None:
    assert got["w"].dtype == np.float32
    assert np.allclose(got["w"], want["w"], rtol=1e-5, atol=1e-6)
    assert np.allclose(got["b"][0], want["b"][0], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("batches", "weighted"),
    [(batches, number % 2 == 1) for number, batches in enumerate(BATCHES)] + [((1,), True)],
)
def test_means_are_of_the_ranks_that_have_a_batch(on_ranks, batches, weighted) -> None:
    weights = [2.0, 0.5, 1.0, 3.0] if weighted else None

    def check(comm: Communicator) -> None:
        with ac.join(comm) as joined:
            for step in range(batches[comm.rank]):
                if weights:
                    joined.weight = weights[comm.rank]
                got = ac.allreduce_gradients(_gradient(comm.rank, step), comm=comm)
                _close(got, _mean(batches, comm.size, step, weights))
        # All are in step again.
        assert comm.allreduce(1) == comm.size

    on_ranks(len(batches), check)


def test_without_anyone_out_of_data_the_bits_are_those_of_the_plain_mean(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
        mine = _gradient(comm.rank, 0)
        want = ac.allreduce_gradients(mine, comm=comm)
        with ac.join(comm):
            got = ac.allreduce_gradients(mine, comm=comm)
        assert got["w"].tobytes() == want["w"].tobytes()
        assert got["b"][0].tobytes() == want["b"][0].tobytes()

    on_ranks(size, check)


def test_sums_missing_gradients_and_large_trees(on_ranks, several) -> None:
    def check(comm: Communicator) -> None:
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

    on_ranks(several, check)


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
def test_weighted_numbers_come_back_as_what_they_are(on_ranks, several, value) -> None:
    def check(comm: Communicator) -> None:
        with ac.join(comm) as joined:
            joined.weight = 2
            got = ac.allreduce_gradients([value, value], comm=comm)
            assert [type(x) for x in got] == [type(value)] * 2
            assert got == [value, value]

    on_ranks(several, check)


def test_where_no_weight_is_left_gradients_are_zeros(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
        with ac.join(comm) as joined:
            joined.weight = 0
            if comm.rank == 0:
                got = ac.allreduce_gradients(np.full(3, np.nan), comm=comm)
                assert got.tolist() == [0.0] * 3

    on_ranks(size, check)


def test_metrics_are_shadowed_too(on_ranks, several) -> None:
    def check(comm: Communicator) -> None:
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

    on_ranks(several, check)


class _Momentum:
    def __init__(self) -> None:
        self.velocity: Any = 0.0

    def update(self, params: Any, grads: Any) -> Any:
        self.velocity = 0.5 * self.velocity + grads
        return params - self.velocity


@pytest.mark.parametrize("batches", BATCHES)
def test_optimizers_take_part(on_ranks, batches) -> None:
    size = len(batches)

    def check(comm: Communicator) -> float:
        optimizer = ac.DistributedOptimizer(_Momentum(), comm=comm)
        params: Any = np.zeros(1)
        with ac.join(comm) as joined:
            for _ in range(batches[comm.rank]):
                params = optimizer.update(params, np.full(1, comm.rank + 1.0))
        return float(joined.synchronize(params)[0])

    want, velocity = 0.0, 0.0
    for step in range(max(batches)):
        live = [rank + 1 for rank in range(size) if step < batches[rank]]
        velocity = 0.5 * velocity + sum(live) / len(live)
        want -= velocity
    assert on_ranks(size, check) == [pytest.approx(want, rel=1e-14)] * size


# Over MPI the contract of the adapters has joins: each rank would load torch's optimizers for these two alone.
@alone
@pytest.mark.parametrize("batches", [(0, 2), (5, 0, 1), (3, 1, 0, 2)])
def test_torch_parameters_and_state_are_the_same_without_synchronizing(on_ranks, batches) -> None:
    torch = pytest.importorskip("torch")
    size = len(batches)

    def check(comm: Communicator) -> tuple[list[float], list[float]]:
        weight = torch.nn.Parameter(torch.ones(3))
        other = torch.nn.Parameter(torch.zeros(2))
        first = ac.DistributedOptimizer(torch.optim.Adam([weight], lr=0.1), comm=comm)
        second = ac.DistributedOptimizer(
            torch.optim.SGD([other], lr=1.0, momentum=0.9, weight_decay=0.1), comm=comm
        )
        with ac.join(comm) as joined:
            for step in range(batches[comm.rank]):
                joined.weight = comm.rank + 1
                weight.grad = torch.full((3,), float(comm.rank + step))
                other.grad = torch.full((2,), float(comm.rank + 1))
                first.step()
                second.step()
        steps = max(batches)
        assert (first.state[weight]["step"] if steps else 0) == steps
        return weight.tolist(), other.tolist()

    weight = torch.nn.Parameter(torch.ones(3))
    other = torch.nn.Parameter(torch.zeros(2))
    first = torch.optim.Adam([weight], lr=0.1)
    second = torch.optim.SGD([other], lr=1.0, momentum=0.9, weight_decay=0.1)
    for step in range(max(batches)):
        live = [rank for rank in range(size) if step < batches[rank]]
        total = sum(rank + 1 for rank in live)
        weight.grad = torch.full((3,), sum((r + 1) * (r + step) for r in live) / total)
        other.grad = torch.full((2,), sum((r + 1) * (r + 1) for r in live) / total)
        first.step()
        second.step()
    results = on_ranks(size, check)
    assert results == [results[0]] * size
    assert results[0][0] == pytest.approx(weight.tolist(), rel=1e-5, abs=1e-6)
    assert results[0][1] == pytest.approx(other.tolist(), rel=1e-5, abs=1e-6)


@alone
def test_no_weight_leaves_torch_parameters_untouched(on_ranks, size) -> None:
    torch = pytest.importorskip("torch")

    def check(comm: Communicator) -> None:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=1.0, weight_decay=0.5)
        ac.DistributedOptimizer(optimizer, comm=comm)
        with ac.join(comm) as joined:
            joined.weight = 0
            if comm.rank == 0:
                weight.grad = torch.ones(3)
                optimizer.step()
        assert weight.tolist() == [1.0] * 3

    on_ranks(size, check)


@pytest.mark.parametrize("shadows", [False, True])
@pytest.mark.parametrize("wrong", ["exception", "other", "weight", "op", "leaf", "nested"])
def test_what_is_wrong_in_one_block_raises_in_all(on_ranks, several, wrong, shadows) -> None:
    errors = {"other": RuntimeError, "nested": RuntimeError, "leaf": TypeError}
    errors["exception"] = KeyError

    def check(comm: Communicator) -> None:
        def block() -> None:
            with ac.join(comm) as joined:
                if shadows and comm.rank == 0:
                    return
                ac.allreduce_gradients(np.ones(2), comm=comm)
                if comm.rank != 1:
                    ac.allreduce_gradients(np.ones(2), comm=comm)
                elif wrong == "exception":
                    raise KeyError("no such batch of join")
                elif wrong == "other":
                    comm.allreduce(1.0)
                elif wrong == "nested":
                    ac.join(comm).__enter__()
                elif wrong == "op":
                    ac.allreduce_gradients(np.ones(2), "max", comm=comm)
                elif wrong == "leaf":
                    ac.allreduce_gradients("text", comm=comm)
                else:
                    joined.weight = -1
                    ac.allreduce_gradients(np.ones(2), comm=comm)

        mine = comm.rank == 1
        error = errors.get(wrong, ValueError) if mine else ac.PeerError
        with pytest.raises(error, match=r"join|allreduce_gradients") as caught:
            block()
        assert mine or caught.value.rank == 1
        assert comm.allreduce(1) == comm.size

    on_ranks(several, check)


def test_an_error_that_the_block_handles_is_over(on_ranks, several) -> None:
    def check(comm: Communicator) -> None:
        with ac.join(comm):
            with pytest.raises((RuntimeError, ac.PeerError)):
                comm.barrier() if comm.rank == 0 else ac.allreduce_gradients(np.ones(2), comm=comm)
            assert ac.allreduce_gradients(np.ones(2), comm=comm).tolist() == [1.0, 1.0]

    on_ranks(several, check)


def test_trees_that_differ_raise_in_all_blocks(on_ranks) -> None:
    def check(comm: Communicator) -> None:
        def block() -> None:
            with ac.join(comm):
                if comm.rank:
                    tree = {"a" if comm.rank == 1 else "b": np.ones(2)}
                    ac.allreduce_gradients(tree, comm=comm)

        with pytest.raises(ac.MismatchError, match=r"tree\['a'\]"):
            block()

    on_ranks(3, check)


def test_ranks_that_enter_no_block_are_told_apart(on_ranks, several) -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(ac.MismatchError, match="join"):
            ac.join(comm).__enter__() if comm.rank else comm.barrier()

    on_ranks(several, check)


def test_accumulation_is_refused(on_ranks, several) -> None:
    def check(comm: Communicator) -> None:
        optimizer = ac.DistributedOptimizer(_Momentum(), comm=comm, accumulate=2)

        def block() -> None:
            with ac.join(comm):
                if comm.rank:
                    optimizer.update(np.zeros(1), np.ones(1))

        with pytest.raises(ValueError if comm.rank else ac.PeerError, match="accumulate"):
            block()

    on_ranks(several, check)


def test_a_communicator_made_before_is_free(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
        with comm.dup() as other, ac.join(comm):
            assert other.allreduce(1) == comm.size
            assert ac.allreduce_gradients(np.ones(1), comm=comm).tolist() == [1.0]

    on_ranks(size, check)
