"""Optimizers that reduce the mean gradient of several steps, and gradients sent as 16 bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from tests.adapters.gradients import SHAPE, Gradients, gradients, zeros
from tests.support.on_ranks import each_rank_of

MICRO = 7  # steps in all: two times three, and one that is not reduced any more
FRAMEWORKS = ["numpy", "torch", "jax"]

Train = Callable[[ac.Communicator, list[dict[str, Any]], dict[str, Any]], list[Gradients]]


class SGD:
    def update(self, params: dict[str, Any], grads: dict[str, Any]) -> dict[str, Any]:
        return {n: p if grads[n] is None else p - grads[n] for n, p in params.items()}


def train_numpy(comm: ac.Communicator, steps: list[Any], options: dict[str, Any]) -> Any:
    optimizer, params, seen = ac.DistributedOptimizer(SGD(), comm=comm, **options), zeros(), []
    for grads in steps:
        params = optimizer.update(params, grads)
        seen.append(params)
    return seen


def train_torch(comm: ac.Communicator, steps: list[Any], options: dict[str, Any]) -> Any:
    torch: Any = pytest.importorskip("torch")
    parameters = [torch.nn.Parameter(torch.from_numpy(array)) for array in zeros().values()]
    # Weight decay and momentum would move parameters in a step that is none.
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    ac.DistributedOptimizer(optimizer, comm=comm, **options)
    seen = []
    for grads in steps:
        for parameter, name in zip(parameters, ("a", "b"), strict=True):
            grad = grads[name]
            parameter.grad = None if grad is None else torch.from_numpy(grad.copy())
        optimizer.step()
        seen.append({n: p.detach().numpy().copy() for n, p in zip("ab", parameters, strict=True)})
    return seen


def optax_steps(
    comm: ac.Communicator,
    steps: list[Any],
    options: dict[str, Any],
    wrap: Callable[[Any], Any] = lambda update: update,
) -> Any:
    jax: Any = pytest.importorskip("jax")
    optax: Any = pytest.importorskip("optax")
    optimizer = ac.DistributedOptimizer(optax.sgd(1.0), comm=comm, **options)
    params = jax.tree.map(jax.numpy.asarray, zeros())
    state, update, seen = optimizer.init(params), wrap(optimizer.update), []
    for grads in steps:
        updates, state = update(jax.tree.map(jax.numpy.asarray, grads), state, params)
        params = optax.apply_updates(params, updates)
        seen.append({name: np.asarray(leaf) for name, leaf in params.items()})
    return seen


TRAINERS: dict[str, Train] = {"numpy": train_numpy, "torch": train_torch, "jax": optax_steps}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@each_rank_of(2)
def test_only_every_third_step_communicates(comm: ac.Communicator, framework: str) -> None:
    steps = [gradients(comm.rank, step) for step in range(MICRO)]
    TRAINERS[framework](comm, steps, {"accumulate": 3})
    assert comm.stats()["allreduce_gradients"]["calls"] == MICRO // 3


@pytest.mark.parametrize("framework", FRAMEWORKS)
@each_rank_of(2)
def test_a_gradient_missing_in_some_steps_counts_as_zeros_there(
    comm: ac.Communicator, framework: str
) -> None:
    first, second = gradients(0, 1)["a"], gradients(1, 0)["a"]
    steps: list[dict[str, Any]] = [dict(gradients(comm.rank, step)) for step in range(2)]
    if comm.rank == 1:
        steps[1]["a"] = None
    else:
        steps[0]["a"] = None
    seen = TRAINERS[framework](comm, steps, {"accumulate": 2, "op": "sum"})
    np.testing.assert_array_equal(seen[-1]["a"], -(first / 2 + second / 2))


@each_rank_of(2)
def test_a_closure_cannot_be_accumulated(comm: ac.Communicator, torch: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    ac.DistributedOptimizer(optimizer, comm=comm, accumulate=2)
    with pytest.raises(ValueError, match="DistributedOptimizer: gradients are accumulated"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize(("step", "wrong"), [(1, "shape"), (2, "structure")])
@each_rank_of(2)
def test_gradients_that_change_are_an_error_and_training_goes_on(
    comm: ac.Communicator, step: int, wrong: str
) -> None:
    optimizer = ac.DistributedOptimizer(SGD(), comm=comm, accumulate=3, op="sum")
    params: Any = {"a": np.zeros(2)}
    good = {"a": np.ones(2)}
    bad = {"a": np.ones(3)} if wrong == "shape" else {**good, "z": np.ones(1)}
    for number in range(3):
        if number == step and comm.rank == 0:
            with pytest.raises(ValueError, match=r"allreduce_gradients: .*same"):
                optimizer.update(params, bad)
        elif number == step == 2:
            with pytest.raises(ac.PeerError, match="allreduce_gradients"):
                optimizer.update(params, good)
        params = optimizer.update(params, good)
    assert params["a"].tolist() == [-2.0, -2.0]


@pytest.mark.parametrize("count", [3, 300_000])
@each_rank_of(2)
def test_compression_halves_the_bytes_and_leaves_other_dtypes_alone(
    comm: ac.Communicator, count: int
) -> None:
    tree = {
        "f4": np.full(count, 1 + 2.0**-12, np.float32),
        "f8": np.full(count, 1 + 2.0**-12)[::-1],
        "missing": None if comm.rank else np.full(3, 1.5, np.float32),
        "large": np.float32(1e6),
        "i4": np.full(count, 2**20 + 1, np.int32),
        "c8": np.full(count, 1 + 2.0**-12, np.complex64),
    }
    got = ac.allreduce_gradients(tree, "sum", compression="float16", comm=comm)
    assert {name: leaf.dtype for name, leaf in got.items()} == {
        **dict.fromkeys(("f4", "missing", "large"), np.float32),
        "f8": np.float64,
        "i4": np.int32,
        "c8": np.complex64,
    }
    values = {"f4": 2, "f8": 2, "missing": 1.5, "large": np.inf, "i4": 2**21 + 2}
    for name, value in (values | {"c8": 2 + 2.0**-11}).items():
        assert (got[name] == value).all(), name
    nbytes = comm.stats()["allreduce_gradients"]["bytes"]
    assert count * (2 + 2 + 4 + 8) <= nbytes < count * (2 + 2 + 4 + 8) + 64 * 7


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"compression": "float16"}, {"op": "sum"}, {"bucket_bytes": 8}]
)
@each_rank_of(2)
def test_arguments_that_differ_raise_on_all(comm: ac.Communicator, options: dict[str, Any]) -> None:
    with pytest.raises(ac.MismatchError, match="DistributedOptimizer"):
        ac.DistributedOptimizer(SGD(), comm=comm, **options if comm.rank else {})


class TestCompiled:
    """On as many ranks as there are processes; `test_processes` runs them on more."""

    def test_a_compiled_update_accumulates_and_compresses(self, jax: Any, optax: Any) -> None:
        world = ac.init()
        steps = [gradients(world.rank, step) for step in range(MICRO)]
        total, mean_of = np.zeros(SHAPE, np.float32), np.float32(3 * world.size)
        for step, params in enumerate(optax_steps(world, steps, {"accumulate": 3}, jax.jit)):
            if step % 3 == 2:
                for rank, before in itertools.product(range(world.size), range(step - 2, step + 1)):
                    total -= gradients(rank, before)["a"] / mean_of
            np.testing.assert_allclose(params["a"], total, rtol=1e-6, atol=1e-6)
        options = {"op": "sum", "compression": "bfloat16"}
        (params,) = optax_steps(world, steps[:1], options, jax.jit)
        rows = [gradients(rank, 0)["a"].astype(ml_dtypes.bfloat16) for rank in range(world.size)]
        total = np.sum([row.astype(np.float32) for row in rows], axis=0, dtype=np.float32)
        want = total.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(params["a"], -want)
        optimizer = ac.DistributedOptimizer(optax.adam(0.5, mu_dtype=np.float32), accumulate=2)
        half, update = jax.numpy.ones(2, ml_dtypes.bfloat16), jax.jit(optimizer.update)
        first, state = update(half, optimizer.init(half), half)
        second, _ = update(half, state, half)
        assert first.tolist() == [0, 0]
        np.testing.assert_allclose(second, np.float32(-0.5), rtol=0.01)
        ac.finalize()

    def test_a_compiled_update_inside_join_is_refused_on_all_ranks(self, jax, optax) -> None:
        world = ac.init()
        optimizer = ac.DistributedOptimizer(optax.sgd(1.0), comm=world)
        params = jax.tree.map(jax.numpy.asarray, zeros())
        state, update = optimizer.init(params), jax.jit(optimizer.update)

        def block() -> None:
            with ac.join(world):
                # Rank 0 has no data.
                if world.rank or world.size == 1:
                    jax.block_until_ready(update(params, state, params))

        with pytest.raises(Exception, match="inside join only") as caught:
            block()
        assert isinstance(caught.value, ac.PeerError) is (world.size > 1 and world.rank == 0)
        assert world.allreduce(1) == world.size
        ac.finalize()
