"""Optax transformations, eagerly on threads and compiled on processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._training.programs import GradientCalls
from arraycomm.adapters.jax import all_reduce
from arraycomm.testing import run
from tests.adapters.gradients import STEPS, Gradients, gradients, reduced, zeros
from tests.support.launched import run_pytest
from tests.support.launcher import needs_mpiexec

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy
adapter = pytest.importorskip("arraycomm.adapters.jax")

Make = Callable[[], Any]


def sgd() -> Any:
    return optax.sgd(0.1, momentum=0.9)


def adam() -> Any:
    """With an epsilon so large that the size of the gradients matters, not their sign alone."""
    return optax.adam(0.1, eps=0.1)


def scheduled() -> Any:
    return optax.sgd(optax.exponential_decay(0.1, transition_steps=1, decay_rate=0.5))


def on_jax(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def train(optimizer: Any, grads_of_step: Callable[[int], Gradients]) -> Gradients:
    params = on_jax(zeros())
    state = optimizer.init(params)
    for step in range(STEPS):
        updates, state = optimizer.update(on_jax(grads_of_step(step)), state, params)
        params = optax.apply_updates(params, updates)
    return {name: np.asarray(param) for name, param in params.items()}


def train_compiled(optimizer: Any, grads_of_step: Callable[[int], Gradients]) -> Gradients:
    compiled = optax.GradientTransformation(optimizer.init, jax.jit(optimizer.update))
    return train(compiled, grads_of_step)


def assert_same(got: Gradients, expected: Gradients) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], strict=True)


@pytest.mark.parametrize("make", [sgd, adam])
def test_the_state_is_that_of_the_plain_transformation(make: Make) -> None:
    params = on_jax(zeros())
    expected = make().init(params)

    def wrapped_state(comm: ac.Communicator) -> Any:
        return ac.DistributedOptimizer(make(), comm=comm).init(params)

    for state in run(2, wrapped_state):
        assert jax.tree.structure(state) == jax.tree.structure(expected)
        for leaf, plain in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(leaf, plain, strict=True)


@pytest.mark.parametrize(
    ("make", "op", "size"),
    [
        *((sgd, "mean", 1), (sgd, "sum", 2), (sgd, "mean", 3), (sgd, "sum", 4)),
        *((adam, "sum", 1), (adam, "mean", 2), (adam, "sum", 3), (adam, "mean", 4)),
        *((scheduled, "sum", 3), (scheduled, "mean", 4)),
    ],
)
def test_an_update_is_the_plain_one_with_the_reduced_gradients(
    make: Make, op: str, size: int
) -> None:
    def on_rank(comm: ac.Communicator) -> Gradients:
        optimizer = ac.DistributedOptimizer(make(), comm=comm, op=op)
        return train(optimizer, lambda step: gradients(comm.rank, step))

    expected = train(make(), lambda step: reduced(size, step, op))
    for params in run(size, on_rank):
        assert_same(params, expected)


@pytest.mark.parametrize("arguments", [("sum",), ()])
def test_all_reduce_takes_the_op_as_reductions_do(arguments: tuple[str, ...]) -> None:
    def on_rank(comm: ac.Communicator) -> Gradients:
        optimizer = optax.chain(adapter.all_reduce(*arguments, comm=comm), sgd())
        return train(optimizer, lambda step: gradients(comm.rank, step))

    expected = train(sgd(), lambda step: reduced(2, step, (*arguments, "mean")[0]))
    for params in run(2, on_rank):
        assert_same(params, expected)


def test_a_schedule_chained_after_wrapping_works() -> None:
    schedule = optax.exponential_decay(0.1, transition_steps=1, decay_rate=0.5)

    def on_rank(comm: ac.Communicator) -> Gradients:
        wrapped = ac.DistributedOptimizer(optax.scale_by_adam(), comm=comm)
        chained = optax.chain(wrapped, optax.scale_by_learning_rate(schedule))
        return train(chained, lambda step: gradients(comm.rank, step))

    plain = optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(schedule))
    expected = train(plain, lambda step: reduced(2, step, "mean"))
    for params in run(2, on_rank):
        assert_same(params, expected)


def test_a_learning_rate_injected_into_the_state_counts() -> None:
    def on_rank(comm: ac.Communicator) -> Any:
        injected = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
        optimizer = ac.DistributedOptimizer(injected, comm=comm)
        params = on_jax(zeros())
        state = optimizer.init(params)
        state.hyperparams["learning_rate"] = jnp.float32(0.5)
        updates, _ = optimizer.update(on_jax(gradients(comm.rank, 0)), state, params)
        return np.asarray(updates["a"])

    for update in run(2, on_rank):
        np.testing.assert_array_equal(update, np.float32(-0.5) * reduced(2, 0, "mean")["a"])


@pytest.mark.parametrize("missing", range(3))
def test_a_gradient_missing_on_one_rank_counts_as_zeros(missing: int) -> None:
    def on_rank(comm: ac.Communicator) -> Any:
        optimizer = ac.DistributedOptimizer(optax.sgd(1.0), comm=comm, op="sum")
        params = on_jax(zeros())
        grads = on_jax(gradients(comm.rank, 0))
        if comm.rank == missing:
            grads["a"] = None
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return updates

    first, second = (gradients(rank, 0)["a"] for rank in range(3) if rank != missing)
    for updates in run(3, on_rank):
        np.testing.assert_array_equal(updates["a"], -(first + second))
        np.testing.assert_array_equal(updates["b"], -reduced(3, 0, "sum")["b"])


def test_a_gradient_missing_on_all_ranks_stays_none() -> None:
    def on_rank(comm: ac.Communicator) -> Any:
        optimizer = ac.DistributedOptimizer(optax.sgd(1.0), comm=comm)
        params = on_jax(zeros())
        grads = on_jax(gradients(comm.rank, 0)) | {"a": None}
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return updates

    for updates in run(3, on_rank):
        assert updates["a"] is None
        np.testing.assert_array_equal(updates["b"], -reduced(3, 0, "mean")["b"])


def test_wrapping_twice_is_refused() -> None:
    def wrap_twice(comm: ac.Communicator) -> None:
        wrapped = ac.DistributedOptimizer(optax.sgd(0.1), comm=comm)
        with pytest.raises(ValueError, match="distributed already"):
            ac.DistributedOptimizer(wrapped, comm=comm)

    run(2, wrap_twice)


@pytest.mark.parametrize("op", ["max", "prod", "average", None])
def test_an_op_other_than_mean_and_sum_is_refused(op: Any) -> None:
    def wrap(comm: ac.Communicator) -> None:
        with pytest.raises(ValueError, match="DistributedOptimizer: op must be"):
            ac.DistributedOptimizer(optax.sgd(0.1), comm=comm, op=op)

    run(2, wrap)


def test_a_compiled_update_on_threads_is_refused() -> None:
    def on_rank(comm: ac.Communicator) -> None:
        optimizer = ac.DistributedOptimizer(optax.sgd(0.1), comm=comm)
        with pytest.raises(
            ac.BackendUnavailableError, match="jitted JAX collectives need a process a rank"
        ):
            train_compiled(optimizer, lambda step: gradients(comm.rank, step))

    run(2, on_rank)


@pytest.fixture(scope="module")
def world() -> Iterator[ac.Communicator]:
    """Return the world: one process, or those that mpiexec started."""
    yield ac.init()
    ac.finalize()


class TestCompiled:
    """On as many ranks as there are processes; `test_compiled_on_processes` runs them on more."""

    @pytest.mark.parametrize(("make", "op"), [(sgd, "sum"), (adam, "mean"), (scheduled, "sum")])
    def test_an_update_is_the_plain_one_with_the_reduced_gradients(
        self, make: Make, op: str, world: ac.Communicator
    ) -> None:
        optimizer = ac.DistributedOptimizer(make(), comm=world, op=op)
        params = train_compiled(optimizer, lambda step: gradients(world.rank, step))
        expected = train_compiled(make(), lambda step: reduced(world.size, step, op))
        for name in expected:
            # The compiler may fuse a multiplication and an addition in one program and not in the
            # other: a rounding more in each of the few operations of a step.
            scale = max(1, np.abs(expected[name]).max())
            atol = 8 * STEPS * np.finfo(np.float32).eps * scale
            np.testing.assert_allclose(params[name], expected[name], rtol=0, atol=atol)

    def test_every_rank_has_the_same_bits(self, world: ac.Communicator) -> None:
        optimizer = ac.DistributedOptimizer(adam(), comm=world)
        params = train_compiled(optimizer, lambda step: gradients(world.rank, step))
        rows = world.allgather(np.concatenate([params["a"], params["b"]]))
        assert {row.tobytes() for row in rows} == {rows[0].tobytes()}

    def test_a_gradient_that_no_rank_has_stays_none(self, world: ac.Communicator) -> None:
        optimizer = ac.DistributedOptimizer(optax.sgd(1.0), comm=world)
        params = on_jax(zeros())
        grads = on_jax(gradients(world.rank, 0)) | {"a": None}
        updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
        assert updates["a"] is None
        np.testing.assert_array_equal(updates["b"], -reduced(world.size, 0, "mean")["b"])

    def test_a_step_is_one_call_for_all_leaves(self, world: ac.Communicator) -> None:
        counted = []

        def counting(self: GradientCalls, leaves: Any, *args: Any, **kwargs: Any) -> Any:
            counted.append(len(leaves))
            return original(self, leaves, *args, **kwargs)

        optimizer = ac.DistributedOptimizer(optax.sgd(1.0), comm=world)
        original = GradientCalls.reduce
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GradientCalls, "reduce", counting)
            train_compiled(optimizer, lambda step: gradients(world.rank, step))
        assert counted == [2] * STEPS

    def test_parameters_keep_their_shape(self, world: ac.Communicator) -> None:
        optimizer = ac.DistributedOptimizer(optax.sgd(1.0), comm=world, op="sum")
        grads = {"matrix": jnp.full((2, 3), world.rank + 1.0), "scalar": jnp.float32(world.rank)}
        updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(grads), grads)
        ranks = range(world.size)
        expected = np.full((2, 3), -float(sum(rank + 1 for rank in ranks)), np.float32)
        np.testing.assert_array_equal(updates["matrix"], expected, strict=True)
        np.testing.assert_array_equal(updates["scalar"], -float(sum(ranks)))

    @pytest.mark.parametrize(
        "make", [all_reduce, lambda comm: ac.DistributedOptimizer(optax.sgd(-1.0), comm=comm)]
    )
    def test_ranks_may_be_under_jit_or_not(self, make: Any, world: ac.Communicator) -> None:
        optimizer = make(comm=world)
        grads = {
            "w": jnp.full(3, float(world.rank)),
            "a": [jnp.float32(1), {"b": jnp.ones(2)}],
            "n": None,
        }
        update = optimizer.update if world.rank % 2 else jax.jit(optimizer.update)
        updates, _ = update(grads, optimizer.init(grads))
        assert jax.tree.structure(updates) == jax.tree.structure(grads)
        np.testing.assert_array_equal(updates["w"], (world.size - 1) / 2)


@needs_mpiexec
@pytest.mark.each_mpi
def test_compiled_on_processes() -> None:
    files = (__file__, str(Path(__file__).with_name("test_accumulation.py")))
    job = run_pytest(*(f"{name}::TestCompiled" for name in files), ranks=3)
    assert job.returncode == 0, job.stdout + job.stderr
    assert " passed" in job.stdout
