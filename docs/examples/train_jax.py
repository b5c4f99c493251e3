"""Train a network to read handwritten digits: a complete program with JAX and optax, for any number of ranks.

    python train_jax.py                # one process; needs no MPI
    arraycomm run -n 3 train_jax.py    # three, which share the work

Both print the same numbers, but for rounding: the batches are the same, and so are the gradients. You may stop the program at
any time. Started again, it goes on with the epoch after that of its checkpoint, on any number of ranks. The digits come with
scikit-learn, the bar with tqdm. `train_torch.py` is the same program with PyTorch.
"""

import argparse
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import arraycomm as ac
from arraycomm.adapters.jax import allreduce


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--stop-after", type=int, metavar="EPOCH", help="end the program early")
    parser.add_argument("--batch", type=int, default=96, help="digits in a batch, over all ranks")
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.npz"))
    return parser.parse_args(arguments)


def read_digits() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the digits to train on, and those to validate with; every rank has all of them."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = (pixels / 16).astype(np.float32), labels.astype(np.int32)
    return {"x": x[:1500], "y": y[:1500]}, {"x": x[1500:], "y": y[1500:]}


class Batch(NamedTuple):
    """Some digits, each with its weight."""

    x: Any
    y: Any
    weights: Any


def padded(batch: Any, length: int) -> Batch:
    """Return a batch of this length: what is missing has weight 0.

    JAX compiles a program for each shape, so all batches have the same, also the last one of an epoch.
    """
    items, weights = batch
    missing = length - len(weights)
    return Batch(
        np.pad(items["x"], [(0, missing), (0, 0)]),
        np.pad(items["y"], (0, missing)),
        np.pad(weights, (0, missing)),
    )


# The network


def initial_parameters(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    """Return parameters as Haiku has them: a dict of modules, each a dict of arrays."""
    hidden, output = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.uniform(hidden, (64, 128)) / 4 - 1 / 8, "b": jnp.zeros(128)},
        "output": {"w": jax.random.uniform(output, (128, 10)) / 4 - 1 / 8, "b": jnp.zeros(10)},
    }


def logits_of(params: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["output"]["w"] + params["output"]["b"]


def evaluate(params: Any, batch: Batch, precision: str) -> tuple[jax.Array, jax.Array]:
    """Return the sum of a batch's losses, and the sums of losses, of right answers and of weights."""
    # bfloat16 has the range of float32: unlike float16, it needs no scaling of the loss.
    cast = jax.tree.map(lambda array: array.astype(precision), (params, batch.x))
    logits = logits_of(*cast).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.y)
    right = logits.argmax(axis=1) == batch.y
    lost = (batch.weights * losses).sum()
    return lost, jnp.stack([lost, (batch.weights * right).sum(), batch.weights.sum()])


# Training


class State(NamedTuple):
    """What changes while the network learns."""

    params: Any
    optimizer: Any


def make_optimizer(rate: float, clip: float, steps: int) -> Any:
    # The rate rises during the first tenth of the steps, and then falls to zero.
    schedule = optax.warmup_cosine_decay_schedule(0.1 * rate, rate, steps // 10, steps)

    def clipped_adam(learning_rate: Any) -> Any:
        return optax.chain(optax.clip_by_global_norm(clip), optax.adamw(learning_rate))

    # The rate is in the optimizer's state, where the program finds it.
    scheduled = optax.inject_hyperparams(clipped_adam)(learning_rate=schedule)

    # From now on, update() first adds up the gradients of all ranks, so every rank clips alike.
    return ac.DistributedOptimizer(scheduled, op="sum")


@partial(jax.jit, static_argnames="optimizer")
def initial_state(seed: int, optimizer: Any) -> State:
    params = initial_parameters(jax.random.key(seed))
    return State(params, optimizer.init(params))


# One program, in which the ranks also add up their gradients. The new state takes the memory of the old one.
@partial(jax.jit, static_argnames=("optimizer", "precision"), donate_argnames=("state", "sums"))
def train(
    state: State, sums: jax.Array, batch: Batch, *, optimizer: Any, precision: str
) -> tuple[State, jax.Array]:
    """Make a step; also add the sums of this rank's part of the batch to `sums`."""
    # The last batch is shorter on some ranks, so each divides by the weight of the batch of all.
    total = allreduce(batch.weights.sum())

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        lost, of_batch = evaluate(params, batch, precision)
        return lost / total, of_batch

    grads, of_batch = jax.grad(loss, has_aux=True)(state.params)
    updates, inner = optimizer.update(grads, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), inner), sums + of_batch


@partial(jax.jit, static_argnames="precision")
def validate(params: Any, sums: jax.Array, batch: Batch, *, precision: str) -> jax.Array:
    return sums + evaluate(params, batch, precision)[1]


def means_over_ranks(sums: jax.Array) -> Any:
    """Return the means over the digits of all ranks; a rank that has none does not count."""
    lost, right, weight = map(float, sums)
    means = {"loss": lost / max(weight, 1), "accuracy": right / max(weight, 1)}
    return ac.mean_metrics(means, weight=weight)


# Checkpoints: an array for each leaf, by its path


def save(path: Path, state: State, seen: dict[str, Any]) -> None:
    """Write a checkpoint; if the program is stopped meanwhile, the one before is still there."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    arrays = {jax.tree_util.keystr(place): np.asarray(leaf) for place, leaf in leaves}
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, seen=json.dumps(seen), **arrays)
    os.replace(unfinished, path)


def load(path: Path, like: State) -> tuple[State, dict[str, Any]]:
    """Read a checkpoint of such a state; also return how much of the data the network has seen."""
    with np.load(path) as arrays:
        state = jax.tree_util.tree_map_with_path(
            lambda place, leaf: jnp.asarray(arrays[jax.tree_util.keystr(place)], leaf.dtype), like
        )
        return state, json.loads(str(arrays["seen"]))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)

    # Every rank runs this whole program. It is one of several under `arraycomm run`, and otherwise the only one.
    comm = ac.init()
    if options.batch % comm.size:
        raise SystemExit(f"--batch must be a multiple of the {comm.size} ranks")

    # Each epoch has a new order of the digits, of which each rank takes its share.
    digits, unseen = read_digits()
    share = ac.DistributedDataContainer(digits, shuffle=True, seed=1)
    validation = ac.DistributedDataContainer(unseen)
    per_rank = options.batch // comm.size

    steps = options.epochs * share.num_batches(per_rank)
    optimizer = make_optimizer(options.rate, options.clip, steps)
    state, seen = initial_state(comm.rank, optimizer), share.state_dict()

    # Rank 0 alone reads the checkpoint. Whether there is one or not, the ranks begin with its values.
    if comm.rank == 0 and options.checkpoint.exists():
        state, seen = load(options.checkpoint, state)
    state, seen = ac.synchronize((state, seen))
    share.load_state_dict(seen)

    for epoch in range(share.epoch, min(options.epochs, options.stop_after or options.epochs)):
        trained, validated = jnp.zeros(3), jnp.zeros(3)

        # The bar is on rank 0, if that writes to a terminal.
        bar = tqdm(share.batches(per_rank), leave=False, disable=None if comm.rank == 0 else True)
        for batch in bar:
            part = padded(batch, per_rank)
            state, trained = train(
                state, trained, part, optimizer=optimizer, precision=options.precision
            )

        for batch in validation.batches(100):
            part = padded(batch, 100)
            validated = validate(state.params, validated, part, precision=options.precision)

        means, others = means_over_ranks(trained), means_over_ranks(validated)
        rate = state.optimizer.hyperparams["learning_rate"]
        ac.println(
            f"epoch {epoch + 1}: loss {means['loss']:.6f}, rate {rate:.6f}, "
            f"validation loss {others['loss']:.6f}, accuracy {others['accuracy']:.4f}",
            ranks=0,
        )
        # The checkpoint says which epoch comes next. All ranks have the same, so one writes it.
        share.set_epoch(epoch + 1)
        if comm.rank == 0:
            save(options.checkpoint, state, share.state_dict())


if __name__ == "__main__":
    main()
