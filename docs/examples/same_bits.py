"""Train a network to read handwritten digits as 12 ranks would: the same bits on any number of ranks up to 12.

    arraycomm run -n 3 same_bits.py --framework torch

Prints the loss and a hash of the parameters. Both are the same with 1, 2, 3 and 4 ranks, to the last bit.
"""

import argparse
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import arraycomm as ac
from arraycomm.adapters.numpy import Adam

# As many ranks as the training has, however many there are.
VIRTUAL_RANKS = 12
# Digits in a batch of one of them.
BATCH = 8
PIXELS, HIDDEN, DIGITS = 64, 32, 10


def initial_parameters() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "hidden": random.normal(size=(PIXELS, HIDDEN)).astype(np.float32) / 8,
        "output": random.normal(size=(HIDDEN, DIGITS)).astype(np.float32) / 6,
    }


# For each framework, a step of the program: takes a batch of one virtual rank, and returns its loss. The optimizer changes the
# parameters in the last of the rounds in which the ranks play all virtual ranks.

Step = Callable[[Any, Any, Any], float]
Parameters = Callable[[], dict[str, Any]]


def with_numpy() -> tuple[Step, Parameters]:
    optimizer = ac.DistributedOptimizer(Adam(0.01), virtual_ranks=VIRTUAL_RANKS)
    params = initial_parameters()

    def step(x: Any, y: Any, weights: Any) -> float:
        nonlocal params
        hidden = np.maximum(x @ params["hidden"], 0)
        logits = hidden @ params["output"]
        logits -= logits.max(axis=1, keepdims=True)
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        rows, scaled = np.arange(len(y)), weights / BATCH
        slope = np.exp(logs)
        slope[rows, y] -= 1
        slope *= scaled[:, None]
        inner = (slope @ params["output"].T) * (hidden > 0)
        grads = {"hidden": x.T @ inner, "output": hidden.T @ slope}
        params = optimizer.update(params, grads)
        return float(-(scaled * logs[rows, y]).sum())

    return step, lambda: params


def with_torch() -> tuple[Step, Parameters]:
    import torch

    # Its kernels add up in another order with another number of threads.
    torch.set_num_threads(1)
    params = {
        name: torch.nn.Parameter(torch.from_numpy(array))
        for name, array in initial_parameters().items()
    }
    adam = torch.optim.Adam(params.values(), lr=0.01)
    optimizer = ac.DistributedOptimizer(adam, virtual_ranks=VIRTUAL_RANKS)

    def step(x: Any, y: Any, weights: Any) -> float:
        logits = torch.relu(torch.from_numpy(x) @ params["hidden"]) @ params["output"]
        losses = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y), reduction="none")
        loss = (torch.from_numpy(weights) * losses).sum() / BATCH
        optimizer.zero_grad()
        loss.backward()
        # In the last round these are the gradients of all; before, there are none.
        torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
        return loss.item()

    return step, lambda: {name: param.detach() for name, param in params.items()}


def with_jax() -> tuple[Step, Parameters]:
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = ac.DistributedOptimizer(optax.adam(0.01), virtual_ranks=VIRTUAL_RANKS)
    params = jax.tree.map(jnp.asarray, initial_parameters())
    state = optimizer.init(params)

    def loss_of(params: Any, x: Any, y: Any, weights: Any) -> Any:
        logits = jax.nn.relu(x @ params["hidden"]) @ params["output"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return (weights * losses).sum() / BATCH

    @jax.jit
    def update(params: Any, state: Any, *batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def step(x: Any, y: Any, weights: Any) -> float:
        nonlocal params, state
        params, state, loss = update(params, state, x, y, weights)
        return float(loss)

    return step, lambda: params


FRAMEWORKS = {"numpy": with_numpy, "torch": with_torch, "jax": with_jax}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--framework", choices=FRAMEWORKS, default="numpy")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args(arguments)

    ac.init()
    pixels, labels = load_digits(return_X_y=True)
    digits = {"x": (pixels / 16).astype(np.float32), "y": labels.astype(np.int64)}
    share = ac.DistributedDataContainer(digits, shuffle=True, virtual_ranks=VIRTUAL_RANKS)
    step, parameters = FRAMEWORKS[options.framework]()

    for epoch in range(options.epochs):
        share.set_epoch(epoch)
        total: Any = ()
        # All batches have one shape, which compiled programs need, and with which kernels take the same way.
        for items, weights in share.batches(BATCH, pad=True):
            loss = step(items["x"], items["y"], weights)
            mean, total = ac.mean_metrics(loss, weight=weights.sum(), onto=total)

    found = hashlib.sha256()
    for name, param in sorted(parameters().items()):
        found.update(name.encode() + np.asarray(param).tobytes())
    ac.println(f"loss {mean!r}, parameters {found.hexdigest()[:16]}", ranks=0)


if __name__ == "__main__":
    main()
