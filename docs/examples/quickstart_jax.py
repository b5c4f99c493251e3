"""Learn x → x² on several ranks with JAX and optax.

    arraycomm run -n 3 quickstart_jax.py

Run with `python`, it is the same program on one rank.
"""

import hashlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import arraycomm as ac

SIZES = (1, 256, 512, 256, 1)


def initial_parameters(key: jax.Array) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(SIZES) - 1)
    return [
        {
            "weight": jax.random.normal(key, (inputs, outputs)) / jnp.sqrt(inputs),
            "bias": jnp.zeros(outputs),
        }
        for key, inputs, outputs in zip(keys, SIZES, SIZES[1:], strict=False)
    ]


def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    *hidden, last = params
    for layer in hidden:
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
    return jnp.mean((x @ last["weight"] + last["bias"] - y) ** 2)


def main() -> None:
    began = time.perf_counter()

    # Start communication. Every rank runs this whole program; comm.rank tells the ranks apart.
    comm = ac.init()

    # Each rank has its own seed, and so its own data.
    data_key, model_key = jax.random.split(jax.random.key(comm.rank))
    x = jax.random.uniform(data_key, (16, 1))
    y = x**2

    # The seeds also gave each rank different parameters: take rank 0's.
    params = ac.synchronize(initial_parameters(model_key))

    # From now on, optimizer.update() first averages the gradients over all ranks.
    optimizer = ac.DistributedOptimizer(optax.adam(1e-3))

    # Needed if rank 0 has loaded a checkpoint; here the state is the same on every rank.
    state = ac.synchronize(optimizer.init(params))

    # The average is part of the compiled program: one message for all gradients.
    @jax.jit
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for epoch in range(1, 101):
        params, state, loss = step(params, state, x, y)
        if epoch % 10 == 0:
            # Every rank's line, in the order of the ranks.
            ac.println(f"epoch {epoch}: loss {loss:.6f}")

    # Same start, same averages: the parameters are the same on every rank, to the bit.
    parameters = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))
    ac.println("parameters", hashlib.sha256(parameters).hexdigest()[:16])
    ac.println(f"{time.perf_counter() - began:.1f} seconds in all")


if __name__ == "__main__":
    main()
