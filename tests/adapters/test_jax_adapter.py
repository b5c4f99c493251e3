"""Optax transformations, eagerly on threads and compiled on processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.testing import run
from tests.adapters.gradients import STEPS, Gradients, gradients, reduced, zeros
from tests.adapters.optimizer_contract import Batch, Driver, OptimizerContract, gradient_of
from tests.support.on_ranks import LAUNCH, each_rank_of

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy
adapter = pytest.importorskip("arraycomm.adapters.jax")
all_reduce = adapter.all_reduce


def sgd() -> Any:
    return optax.sgd(0.1, momentum=0.9)


def on_jax(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def train(optimizer: Any, grads_of_step: Callable[[int], Gradients]) -> Gradients:
    params = on_jax(zeros())
    state = optimizer.init(params)
    for step in range(STEPS):
        updates, state = optimizer.update(on_jax(grads_of_step(step)), state, params)
        params = optax.apply_updates(params, updates)
    return {name: np.asarray(param) for name, param in params.items()}


def assert_same(got: Gradients, expected: Gradients) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], strict=True)


def make_optax(kind: str, clip: float | None) -> Any:
    """With an epsilon so large that the size of the gradients matters, not their sign alone."""

    def chain(learning_rate: Any) -> Any:
        plain = {
            "sgd": lambda: optax.sgd(learning_rate),
            "momentum": lambda: optax.sgd(learning_rate, momentum=0.9),
            "adamw": lambda: optax.adamw(learning_rate, eps=0.1, weight_decay=0.1),
        }[kind]()
        return plain if clip is None else optax.chain(optax.clip_by_global_norm(clip), plain)

    return optax.inject_hyperparams(chain)(learning_rate=0.1)


class JaxDriver(Driver):
    """Optax transformations, which clip what they get: eagerly on threads, compiled on processes."""

    dtype = np.float32
    # The compiler may fuse a multiplication and an addition in one program and not in the other.
    exact = LAUNCH is None

    def make(self, params: Any, kind: str) -> None:
        self.params = on_jax(params)
        self.optimizer = make_optax(kind, self.clip)
        self.state_of_optimizer = self.optimizer.init(self.params)
        self.update, self.accumulates = self.optimizer.update, False

    def distribute(self, comm: ac.Communicator, options: dict[str, Any]) -> None:
        self.optimizer = ac.DistributedOptimizer(self.optimizer, comm=comm, **options)
        self.accumulates = options.get("accumulate", 1) > 1
        if self.accumulates:
            fresh = self.optimizer.init(self.params)
            self.state_of_optimizer = fresh._replace(inner=self.state_of_optimizer)
        if options.get("shard"):
            self.state_of_optimizer = self.optimizer.init(self.params)
        self.update = self.optimizer.update if LAUNCH is None else jax.jit(self.optimizer.update)

    def apply(self, grads: Any) -> None:
        updates, self.state_of_optimizer = self.update(
            on_jax(grads), self.state_of_optimizer, self.params
        )
        self.params = {
            name: param if updates[name] is None else optax.apply_updates(param, updates[name])
            for name, param in self.params.items()
        }

    def learn(self, part: Batch, factor: float) -> None:
        params = {name: np.asarray(param, np.float64) for name, param in self.params.items()}
        # As `jax.grad` does, with zeros for what is not used.
        self.apply(
            {
                name: np.zeros_like(params[name]) if grad is None else factor * grad
                for name, grad in gradient_of(params, part).items()
            }
        )

    def set_rate(self, rate: float) -> None:
        state = self.state_of_optimizer
        plain = state.inner if self.accumulates else state
        plain.hyperparams["learning_rate"] = jnp.float32(rate)

    def parameters(self) -> Any:
        return {name: np.asarray(param) for name, param in self.params.items()}

    def state(self) -> Any:
        return jax.tree.map(np.asarray, (self.params, self.state_of_optimizer))

    def resume(self, saved: Any, comm: ac.Communicator) -> None:
        self.params, self.state_of_optimizer = on_jax(ac.synchronize(saved, comm=comm))

    def synchronize(self, root: int, comm: ac.Communicator) -> None:
        held = self.params, self.state_of_optimizer
        self.params, self.state_of_optimizer = ac.synchronize(held, root=root, comm=comm)

    def leave_compiled(self) -> None:
        self.update = self.optimizer.update

    def finish(self, joined: ac.Join) -> None:
        held = self.params, self.state_of_optimizer
        self.params, self.state_of_optimizer = joined.synchronize(held)


class TestContract(OptimizerContract):
    driver = JaxDriver


@pytest.mark.parametrize("arguments", [("sum",), ()])
@each_rank_of(2)
def test_all_reduce_takes_the_op_as_reductions_do(
    comm: ac.Communicator, arguments: tuple[str, ...]
) -> None:
    expected = train(sgd(), lambda step: reduced(2, step, (*arguments, "mean")[0]))
    optimizer = optax.chain(adapter.all_reduce(*arguments, comm=comm), sgd())
    params = train(optimizer, lambda step: gradients(comm.rank, step))
    assert_same(params, expected)


@each_rank_of(2)
def test_a_schedule_chained_after_wrapping_works(comm: ac.Communicator) -> None:
    schedule = optax.exponential_decay(0.1, transition_steps=1, decay_rate=0.5)
    plain = optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(schedule))
    expected = train(plain, lambda step: reduced(2, step, "mean"))
    wrapped = ac.DistributedOptimizer(optax.scale_by_adam(), comm=comm)
    chained = optax.chain(wrapped, optax.scale_by_learning_rate(schedule))
    params = train(chained, lambda step: gradients(comm.rank, step))
    assert_same(params, expected)


@each_rank_of(2)
def test_what_looks_at_single_examples_is_refused_inside_and_right_before(
    comm: ac.Communicator,
) -> None:
    private = partial(
        optax.contrib.differentially_private_aggregate,
        l2_norm_clip=1.0,
        noise_multiplier=0.0,
        key=0,
    )
    examples = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    params = jnp.zeros(3)

    def step(optimizer: Any, given: Any) -> Any:
        return optimizer.update(jnp.asarray(given), optimizer.init(params), params)[0]

    expected = step(optax.chain(private(), optax.sgd(1.0)), examples)
    own = examples[comm.rank :: comm.size]
    for inside in (private(), optax.chain(private(), optax.sgd(0.1))):
        with pytest.raises(TypeError, match=r"as optax\.contrib\.differentially_private_agg"):
            step(ac.DistributedOptimizer(inside, comm=comm), own)
    right = optax.chain(private(), ac.DistributedOptimizer(optax.sgd(1.0), comm=comm))
    np.testing.assert_allclose(step(right, own), expected, rtol=1e-5)


@each_rank_of(2)
def test_ranks_compare_soon_after_an_update_that_has_raised_on_one(comm: ac.Communicator) -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return [[-update for update in updates]][comm.rank * (made == [3])], state

    plain = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
    optimizer, params, made = ac.DistributedOptimizer(plain, comm=comm), [jnp.zeros(1)], [0]

    def train() -> None:
        nonlocal params
        for made[0] in range(8):
            with suppress(IndexError):
                updates, _ = optimizer.update([jnp.ones(1)], optax.EmptyState(), params)
                params = optax.apply_updates(params, updates)

    said = r"params\[0\] is not .* rank 0: -5.0 .* rank 1: -4.0"
    with pytest.raises(ac.MismatchError, match=said):
        train()


@each_rank_of(2)
def test_a_list_that_a_schedule_grows_on_one_rank_is_no_hyperparameter(
    comm: ac.Communicator,
) -> None:
    seen: list[float] = []

    def schedule(step: Any) -> float:
        if comm.rank == 0:
            seen.append(0.1)
        return 0.1

    optimizer = ac.DistributedOptimizer(optax.sgd(schedule), comm=comm, verify_every=1)
    expected = train(optax.sgd(0.1), lambda step: reduced(2, step, "mean"))
    assert_same(train(optimizer, lambda step: gradients(comm.rank, step)), expected)
    boundaries = [1] if comm.rank else [2]
    differing = optax.join_schedules([lambda n: 0.1, lambda n: 0.2], boundaries)
    optimizer = ac.DistributedOptimizer(optax.sgd(differing), comm=comm)
    with pytest.raises(ac.MismatchError, match="boundaries of join_schedules"):
        train(optimizer, lambda step: gradients(comm.rank, step))


@each_rank_of(2)
def test_what_takes_more_than_gradients_is_accumulated_by_optax(comm: ac.Communicator) -> None:
    params, plain = jnp.ones(2), optax.polyak_sgd()
    optimizer = ac.DistributedOptimizer(plain, comm=comm, accumulate=2)
    with pytest.raises(ValueError, match=r"optax\.MultiSteps\(optimizer, 2\)\.gradient_tr"):
        optimizer.update(params, optimizer.init(params), params, value=1.0)
    with pytest.raises(TypeError, match=r"MultiSteps; pass what its gradient_transformation\(\)"):
        ac.DistributedOptimizer(optax.MultiSteps(plain, 2), comm=comm)

    def trained(optimizer: Any, rank: float) -> Any:
        now, state = params, optimizer.init(params)
        for step in range(4):
            value = 1.0 + step + rank
            grads = jnp.full(2, value)
            updates, state = optimizer.update(grads, state, now, value=value)
            now = optax.apply_updates(now, updates)
        return now

    several = optax.MultiSteps(plain, 2).gradient_transformation()
    found = trained(ac.DistributedOptimizer(several, comm=comm), comm.rank)
    np.testing.assert_allclose(found, trained(several, 0.5), rtol=1e-6)


@each_rank_of(2)
def test_an_argument_that_one_rank_passes_wrongly_is_an_error_on_all(comm: ac.Communicator) -> None:
    plain = optax.GradientTransformationExtraArgs(
        lambda params: (), lambda u, s, p=None, **_: (u, s)
    )
    optimizer = ac.DistributedOptimizer(plain, comm=comm)
    wrong = {"hessian_fn": jnp.sin} if comm.rank else {}
    with pytest.raises(
        TypeError if wrong else ac.PeerError, match="hessian_fn, of which it is not"
    ):
        optimizer.update(jnp.ones(2), (), **wrong)
    assert optimizer.update(jnp.full(2, float(comm.rank)), ())[0].tolist() == [0.5, 0.5]


@each_rank_of(2)
def test_what_would_apply_gradients_of_one_rank_is_refused(comm: ac.Communicator) -> None:
    params = jnp.zeros(3)
    for wrap, refused in (
        (optax.transforms.conditionally_transform, True),
        (optax.transforms.conditionally_mask, False),
    ):
        plain = ac.DistributedOptimizer(optax.sgd(1.0), comm=comm)
        optimizer = wrap(plain, lambda step: step % 2 == 1)
        state = optimizer.init(params)
        if refused:
            with pytest.raises(TypeError, match="conditionally_transform around a distributed"):
                optimizer.update(params + comm.rank, state, params)
        else:
            with pytest.raises(ac.BackendUnavailableError):
                optimizer.update(params + comm.rank, state, params)
        inside = ac.DistributedOptimizer(
            wrap(optax.sgd(1.0), lambda step: step % 2 == 1), comm=comm
        )
        state = inside.init(params)
        for step in range(2):
            update, state = inside.update(params + comm.rank, state, params)
            assert (update == (-0.5 if step else (0.5 if refused else 0.0))).all()


@each_rank_of(2)
def test_a_compiled_update_on_threads_is_refused(comm: ac.Communicator) -> None:
    optimizer = ac.DistributedOptimizer(optax.sgd(0.1), comm=comm)
    params = on_jax(zeros())
    state, said = optimizer.init(params), "jitted JAX collectives need a process a rank"
    with pytest.raises(ac.BackendUnavailableError, match=said):
        jax.jit(optimizer.update)(params, state, params)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_gradient_that_no_virtual_rank_has_stays_none(size: int) -> None:
    def train(comm: ac.Communicator) -> Any:
        optimizer = ac.DistributedOptimizer(optax.sgd(1.0), comm=comm, virtual_ranks=4)
        params = on_jax(zeros())
        state, updates = optimizer.init(params), None
        for turn in range(comm.rank, 4, comm.size):
            grads = on_jax(gradients(turn, 0)) | {"a": None}
            updates, state = optimizer.update(grads, state, params)
        return updates

    for updates in run(size, train):
        assert updates["a"] is None
        np.testing.assert_array_equal(updates["b"], -reduced(4, 0, "mean")["b"])


class TestCompiled:
    """On as many ranks as there are processes; `test_processes` runs them on more."""

    def test_a_gradient_that_no_rank_has_stays_none(self, world: ac.Communicator) -> None:
        optimizer = ac.DistributedOptimizer(optax.sgd(1.0), comm=world)
        params = on_jax(zeros())
        grads = on_jax(gradients(world.rank, 0)) | {"a": None}
        updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
        assert updates["a"] is None
        np.testing.assert_array_equal(updates["b"], -reduced(world.size, 0, "mean")["b"])

    def test_a_gradient_that_no_virtual_rank_has_may_not_change_the_state(
        self, world: ac.Communicator
    ) -> None:
        inner = optax.sgd(1.0, momentum=0.9)
        optimizer = ac.DistributedOptimizer(inner, comm=world, virtual_ranks=2 * world.size)
        params = on_jax(zeros())
        grads = on_jax(gradients(world.rank, 0)) | {"a": None}
        with pytest.raises(TypeError, match="gradients that are None changed it; pass zeros"):
            jax.jit(optimizer.update)(grads, optimizer.init(params), params)

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
