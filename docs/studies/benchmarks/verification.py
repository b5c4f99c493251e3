"""What it costs that ranks compare what their steps depend on: `mpiexec -n 2 python verification.py`.

Each training loop runs twice, with `verify_every` as it is and with 0, in turns step by step. The cost of a step is that of
the median step, and a hundredth of what a step takes longer in which all arrays are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import arraycomm as ac
from arraycomm.adapters.numpy import Momentum

comm = ac.init()
EVERY = 100


def torch_loop(model: Any, x: Any, **options: Any) -> Callable[[], None]:
    optimizer = ac.DistributedOptimizer(torch.optim.AdamW(model.parameters()), **options)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def mlp(**options: Any) -> Callable[[], None]:
    torch.manual_seed(0)
    widths = [1024, 3072, 3072, 2560]
    layers = [torch.nn.Linear(*pair) for pair in pairwise(widths)]
    return torch_loop(torch.nn.Sequential(*layers), torch.randn(32, 1024), **options)


def cnn(**options: Any) -> Callable[[], None]:
    torch.manual_seed(0)
    widths = [3, 32, 64, 128]
    layers: list[Any] = []
    for pair in pairwise(widths):
        layers += [torch.nn.Conv2d(*pair, 3, padding=1), torch.nn.BatchNorm2d(pair[1])]
        layers += [torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(2048, 10))
    return torch_loop(model, torch.randn(16, 3, 32, 32), **options)


def params() -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {"a": (1024, 2048), "b": (2048, 2048), "c": (2048, 1024)}
    return {name: random.normal(size=shape, scale=0.01) for name, shape in shapes.items()}


def jitted(**options: Any) -> Callable[[], None]:
    optimizer = ac.DistributedOptimizer(optax.adamw(1e-3), **options)
    x = jnp.ones((64, 1024), jnp.float32)

    @jax.jit
    def update(now: Any, state: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] @ p["c"]) ** 2)

        updates, state = optimizer.update(jax.grad(loss)(now), state, now)
        return optax.apply_updates(now, updates), state

    now = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params())
    held = [now, optimizer.init(now)]

    def step() -> None:
        held[:] = jax.block_until_ready(update(*held))

    return step


def numpy(**options: Any) -> Callable[[], None]:
    optimizer = ac.DistributedOptimizer(Momentum(0.01), **options)
    held = [{name: leaf.astype(np.float32) for name, leaf in params().items()}]

    def step() -> None:
        grads = {name: 0.1 * leaf for name, leaf in held[0].items()}
        held[0] = optimizer.update(held[0], grads)

    return step


def small(**options: Any) -> Callable[[], None]:
    torch.manual_seed(0)
    return torch_loop(torch.nn.Linear(64, 8), torch.randn(16, 64), **options)


def seconds(step: Callable[[], None]) -> float:
    comm.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    for make in (mlp, cnn, jitted, numpy, small):
        loops = [make(verify_every=0), make()]
        # The first step compares all arrays, and so does every hundredth after it.
        times = np.array([[seconds(loop) for loop in loops] for _ in range(2 * EVERY + 1)])[1:]
        without, with_ = np.median(times, axis=0)
        longer = times[EVERY - 1 :: EVERY, 1].min() - with_
        ratio = (with_ + longer / EVERY) / without
        ac.println(
            f"{make.__name__}: {without * 1e3:.3f} ms a step without, {with_ * 1e3:.3f} with, "
            f"{longer * 1e3:.2f} ms more if all is compared, ratio {ratio:.4f}",
            ranks=0,
        )


main()
