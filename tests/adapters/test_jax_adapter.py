"""Optax transformations, eagerly on threads and compiled on processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._trees.buffers import BufferPool
from arraycomm.testing import run
from tests.adapters.gradients import STEPS, Gradients, gradients, reduced, zeros
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


# Training loops -----------------------------------------------------------------------------------

# One rank alone, and several. Processes compile, each for itself.
NUMBERS = (1, 3) if LAUNCH is None else (LAUNCH.size,)


def make_optax(kind: str) -> Any:
    """With an epsilon so large that the size of the gradients matters, not their sign alone."""
    plain = {
        "sgd": optax.sgd,
        "momentum": lambda learning_rate: optax.chain(
            optax.clip_by_global_norm(0.5), optax.sgd(learning_rate, momentum=0.9)
        ),
        "adamw": lambda learning_rate: optax.adamw(learning_rate, eps=0.1, weight_decay=0.1),
    }[kind]
    return optax.inject_hyperparams(plain)(learning_rate=0.1)


class Loop:
    """Parameters and a state that an optimizer updates, on a rank or in one process."""

    def __init__(self, kind: str, comm: ac.Communicator | None = None, **options: Any) -> None:
        plain = make_optax(kind)
        self.optimizer = (
            plain if comm is None else ac.DistributedOptimizer(plain, comm=comm, **options)
        )
        self.update = self.optimizer.update if LAUNCH is None else jax.jit(self.optimizer.update)
        params = on_jax(zeros())
        self.held = params, self.optimizer.init(params)

    def step(self, grads: Any, update: Any = None) -> None:
        params, state = self.held
        updates, state = (update or self.update)(on_jax(grads), state, params)
        self.held = optax.apply_updates(params, updates), state

    def set_rate(self, rate: float) -> None:
        state = self.held[1]
        getattr(state, "inner", state).hyperparams["learning_rate"] = jnp.float32(rate)

    def assert_near(self, other: Loop, *, exact: bool = False) -> None:
        slack = 0 if exact and LAUNCH is None else 1000 * np.finfo(np.float32).eps
        for name, param in self.held[0].items():
            np.testing.assert_allclose(param, other.held[0][name], rtol=slack, atol=slack)


LOOPS = {
    "sum": ("sgd", {"op": "sum"}),
    "mean": ("momentum", {}),
    "accumulated": ("momentum", {"accumulate": 2}),
    "sharded": ("adamw", {"shard": True, "bucket_bytes": 1}),
}


class TestLoops:
    @pytest.mark.parametrize("case", LOOPS)
    @each_rank_of(NUMBERS)
    def test_ranks_train_as_one_process_with_the_reduced_gradients(
        self, comm: ac.Communicator, case: str
    ) -> None:
        """With another rate from the middle on, where rank 0 alone has saved what it has."""
        kind, options = LOOPS[case]
        every, op = options.get("accumulate", 1), options.get("op", "mean")
        one, mine = Loop(kind), Loop(kind, comm, verify_every=1, **options)
        for step in range(4):
            if step == 2:
                if case != "sharded":
                    mine.held = ac.synchronize(mine.held if comm.rank == 0 else None, comm=comm)
                one.set_rate(0.02)
                mine.set_rate(0.02)
            # The mean of steps with one and with three times the gradients is that of two.
            for part in range(1, 2 * every, 2):
                grads = gradients(comm.rank, step)
                mine.step({name: array * np.float32(part) for name, array in grads.items()})
            total = reduced(comm.size, step, op)
            one.step({name: array * np.float32(every) for name, array in total.items()})
            mine.assert_near(one, exact=every == 1)
        found = [param.tobytes() for param in map(np.asarray, mine.held[0].values())]
        assert comm.allgather_object(found) == [found] * comm.size

    @each_rank_of(NUMBERS)
    def test_ranks_that_run_out_of_data_take_the_state_of_the_last(
        self, comm: ac.Communicator
    ) -> None:
        counts = (2, 4, 3)[: comm.size]
        one, mine = Loop("adamw"), Loop("adamw", comm)
        with ac.join(comm) as joined:
            for step in range(counts[comm.rank]):
                joined.weight = 2 + comm.rank
                mine.step(gradients(comm.rank, step), mine.optimizer.update)
        mine.held = joined.synchronize(mine.held)
        mine.step(gradients(comm.rank, 9))
        for step in range(max(counts)):
            live = [rank for rank, count in enumerate(counts) if step < count]
            total = sum(2 + rank for rank in live)
            one.step(
                {
                    name: sum((2 + rank) * gradients(rank, step)[name] for rank in live) / total
                    for name in zeros()
                }
            )
        one.step(reduced(comm.size, 9, "mean"))
        mine.assert_near(one)

    def test_steps_reuse_the_memory_of_those_before(
        self, on_ranks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Memory for reduced gradients is new in the first steps only."""
        new, acquire = list[int](), BufferPool.acquire

        def noted(pool: BufferPool) -> tuple[Any, bool]:
            memory, is_new = acquire(pool)
            new.extend([len(memory)] * (is_new and len(memory) > 0))
            return memory, is_new

        monkeypatch.setattr(BufferPool, "acquire", noted)

        def train(comm: ac.Communicator) -> None:
            mine = Loop("sgd", comm)
            for step in range(10):
                if step == 4:
                    comm.barrier()
                    new.clear()
                    comm.barrier()
                mine.step(gradients(comm.rank, step))

        on_ranks(NUMBERS[-1], train)
        assert not new

    @each_rank_of(NUMBERS[-1:])
    def test_wrapping_twice_is_refused(self, comm: ac.Communicator) -> None:
        with pytest.raises(ValueError, match="distributed already"):
            ac.DistributedOptimizer(Loop("sgd", comm).optimizer, comm=comm)


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


@each_rank_of(3)
def test_sparse_gradients_are_accumulated_in_dense_sums(comm: ac.Communicator) -> None:
    sparse = pytest.importorskip("jax.experimental.sparse")
    optimizer = ac.DistributedOptimizer(optax.sgd(1.0), comm=comm, accumulate=2)
    weight = jnp.zeros((2, 2))
    state = optimizer.init(weight)
    for step in range(2):
        grad = sparse.BCOO.fromdense((comm.rank + step) * jnp.eye(2))
        updates, state = optimizer.update(grad, state, weight)
    np.testing.assert_array_equal(updates, -1.5 * np.eye(2))


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"virtual_ranks": 4}], ids=str)
@pytest.mark.parametrize("wrong", ["that of the plain one", None, "that of other parameters"])
def test_a_wrong_state_is_refused_on_all_ranks(options: dict[str, int], wrong: str | None) -> None:
    def step(comm: ac.Communicator) -> None:
        optimizer, params = optax.adam(0.1), on_jax(zeros())
        made = ac.DistributedOptimizer(optimizer, comm=comm, **options)
        states = {"that of the plain one": optimizer.init(params), None: None}
        other = states.get(wrong, made.init([params, params]))
        state = made.init(params)
        if comm.rank and "accumulate" in options:
            state = made.update(params, state, params)[1]
        with pytest.raises((TypeError, ac.PeerError), match="its init or update returned"):
            made.update(params, state if comm.rank else other, params)

    run(2, step)


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
