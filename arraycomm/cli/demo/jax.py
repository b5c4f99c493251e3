"""Softmax regression in JAX and optax, each step one compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import arraycomm as ac
from arraycomm.cli.demo.data import Batch, Linear

# Collectives inside `jax.jit` work on the CPU only, and JAX would choose a GPU if there is one.
jax.config.update("jax_platforms", "cpu")


class Trainer:
    """A model and its optimizer: distributed over `comm`, or alone without one."""

    def __init__(self, start: Linear, learning_rate: float, comm: ac.Communicator | None) -> None:
        self._params = jax.tree.map(jnp.asarray, start)
        optimizer: optax.GradientTransformation = optax.sgd(learning_rate)
        if comm is not None:
            self._params = ac.synchronize(self._params, comm=comm)
            optimizer = ac.DistributedOptimizer(optimizer, comm=comm, op="sum")
        self._state = optimizer.init(self._params)

        @jax.jit
        def step(
            params: Linear, state: optax.OptState, batch: Batch
        ) -> tuple[Linear, optax.OptState, jax.Array]:
            loss, grads = jax.value_and_grad(weighted_loss)(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        self._step = step

    def step(self, batch: Batch) -> float:
        """Learn from a batch; return the sum of its weighted losses."""
        self._params, self._state, loss = self._step(self._params, self._state, batch)
        return float(loss)

    def parameters(self) -> Linear:
        """Return the parameters as NumPy arrays."""
        return Linear(np.asarray(self._params.weight), np.asarray(self._params.bias))


def weighted_loss(params: Linear, batch: Batch) -> jax.Array:
    """Return the sum of a batch's losses, each with its weight."""
    logits = batch.images @ params.weight.T + params.bias
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return jnp.vdot(batch.weights, losses)
