"""Checks of flax and equinox in one launched program; see `test_jax_collectives.py`."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training.train_state import TrainState

import arraycomm as ac
from tests.support.launched import checks_in, perform

STEPS = 2
RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"


def regression() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)), rng.normal(size=(12, 1))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.tied = self.last
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.tanh(self.first(x))))


def with_nnx(seed: int, optimizer: Any, data: Any, take: Any) -> Any:
    model = take(Network(nnx.Rngs(seed)))
    trainer = take(nnx.Optimizer(model, optimizer, wrt=nnx.Param))

    def step(model: Any, trainer: Any, x: Any, y: Any) -> None:
        gradient = nnx.grad(lambda model: ((model(x) - y) ** 2).mean())(model)
        trainer.update(model, gradient)

    advance = nnx.jit(step)
    for _ in range(STEPS):
        advance(model, trainer, *data)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def with_linen(seed: int, optimizer: Any, data: Any, take: Any) -> Any:
    model = flax.linen.Sequential([flax.linen.Dense(4), flax.linen.tanh, flax.linen.Dense(1)])
    params = model.init(jax.random.key(seed), data[0])
    state = take(TrainState.create(apply_fn=model.apply, params=params, tx=optimizer))

    def step(state: Any, x: Any, y: Any) -> Any:
        gradient = jax.grad(lambda p: ((state.apply_fn(p, x) - y) ** 2).mean())(state.params)
        return state.apply_gradients(grads=gradient)

    advance = jax.jit(step)
    for _ in range(STEPS):
        state = advance(state, *data)
    return state.params


def with_equinox(seed: int, optimizer: Any, data: Any, take: Any) -> Any:
    model = take(equinox.nn.MLP(3, 1, 4, 1, key=jax.random.key(seed)))
    state = optimizer.init(equinox.filter(model, equinox.is_inexact_array))

    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        gradient = equinox.filter_grad(lambda m: ((jax.vmap(m)(x) - y) ** 2).mean())(model)
        params = equinox.filter(model, equinox.is_inexact_array)
        updates, state = optimizer.update(gradient, state, params)
        return equinox.apply_updates(model, updates), state

    advance = equinox.filter_jit(step)
    for _ in range(STEPS):
        model, state = advance(model, state, *data)
    return equinox.filter(model, equinox.is_inexact_array)


def _train(with_library: Callable[..., Any]) -> None:
    comm, (x, y) = ac.world(), regression()
    part = len(x) // comm.size
    own = slice(comm.rank * part, (comm.rank + 1) * part)
    optimizer = ac.DistributedOptimizer(optax.sgd(0.1, 0.9))
    got = with_library(comm.rank, optimizer, (x[own], y[own]), ac.synchronize)
    for leaf in jax.tree.leaves(got):
        rows = comm.allgather(np.asarray(leaf))
        assert {row.tobytes() for row in rows} == {rows[0].tobytes()}
    if comm.rank == 0:
        # Compiled once: the others have the same bits.
        expected = with_library(0, optax.sgd(0.1, 0.9), (x, y), lambda tree: tree)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            message = with_library.__name__
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5, err_msg=message)


def every_library_trains_as_one_process() -> None:
    for with_library in (with_nnx, with_linen, with_equinox):
        _train(with_library)


def modules_and_states_of_nnx_get_the_values_of_the_root() -> None:
    rank = ac.world().rank
    model, root = Network(nnx.Rngs(rank)), Network(nnx.Rngs(0))
    expected = np.asarray(root.last.kernel[...])
    for tree in (nnx.state(model), {"variable": nnx.state(model)["last"]["kernel"]}):
        found = jax.tree.leaves(ac.synchronize(tree))
        assert any(np.array_equal(leaf, expected) for leaf in found if leaf.shape == (4, 1))
    own = jax.random.key_data(model.dropout.rngs.key[...])
    assert ac.synchronize({"model": model})["model"] is model
    np.testing.assert_array_equal(model.last.kernel[...], expected)
    assert model.tied is model.last
    # Random generators stay this rank's.
    np.testing.assert_array_equal(jax.random.key_data(model.dropout.rngs.key[...]), own)
    mean = ac.allreduce_tree({"p": nnx.Param(jnp.full(2, float(rank)))}, "mean")["p"]
    assert isinstance(mean, nnx.Param)
    assert (mean[...] == (ac.world().size - 1) / 2).all()
    # As a checkpoint that rank 0 alone has read.
    other = Network(nnx.Rngs(7))
    saved = nnx.to_pure_dict(nnx.state(root, nnx.Param)) if rank == 0 else None
    nnx.update(other, ac.synchronize(jax.tree.map(np.asarray, saved)))
    np.testing.assert_array_equal(other.last.kernel[...], expected)
    # An optimizer that changes its model in place.
    slope = nnx.grad(lambda model: rank * model.last.kernel[...].sum())(root)
    optimizer = nnx.Optimizer(root, optax.sgd(0.5), wrt=nnx.Param)
    ac.DistributedOptimizer(optimizer).update(root, slope)
    change = np.float32(0.5 * (ac.world().size - 1) / 2)
    np.testing.assert_allclose(root.last.kernel[...], expected - change, rtol=1e-6)


def what_orbax_restores_on_rank_0_is_everywhere() -> None:
    rank = ac.world().rank
    schedule = optax.cosine_decay_schedule(0.1, 9)
    plain = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule, momentum=0.9)
    optimizer = ac.DistributedOptimizer(plain)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(jax.tree.map(jnp.cos, params), state, params)
        return optax.apply_updates(params, updates), state

    # As Haiku has them: modules by their paths.
    params = {"net/~/linear": {"w": jnp.ones((2, 3)), "b": jnp.zeros(3, jnp.bfloat16)}}
    trained = step(params, optimizer.init(params))
    other = jax.tree.map(lambda leaf: leaf + rank, trained)
    restored = None
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(Path(folder) / "state", other)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(Path(folder) / "state", other)
    found = ac.synchronize(restored)
    for got, wanted in ((found, trained), (step(*found), step(*trained))):
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(one, other, strict=True)


def an_overflow_on_one_rank_counts_on_all() -> None:
    """The recipe for DynamicScale."""
    comm, source = ac.world(), RECIPES.read_text(encoding="utf-8")
    (recipe,) = re.findall(
        r"```python\n(from flax.training.dynamic_scale.*?)```", source, re.DOTALL
    )
    names = {"ac": ac, "jax": jax, "jnp": jnp, "optax": optax}
    exec(recipe, names)
    params, state, scale = (names[name] for name in ("params", "state", "scale"))
    large = jnp.full(3, np.inf if comm.rank == comm.size - 1 else 1.0)
    after, _, halved = names["scaled_step"](params, state, scale, large)
    np.testing.assert_array_equal(after, params)
    assert (float(halved.scale), int(halved.fin_steps)) == (32768, 0)
    after, _, same = names["scaled_step"](after, state, halved, jnp.ones(3))
    assert (after != params).all()
    assert (float(same.scale), int(same.fin_steps)) == (32768, 1)


CHECKS = checks_in(globals())

if __name__ == "__main__":
    ac.init(timeout=60)
    perform(CHECKS)
