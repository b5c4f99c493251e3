"""Train a network to read handwritten digits: a complete program with NumPy alone, for any number of ranks.

    python train_numpy.py                # one process; needs no MPI
    arraycomm run -n 3 train_numpy.py    # three, which share the work

Both print the same numbers, but for rounding: the batches are the same, and so are the gradients. You may stop the program at
any time. Started again, it goes on with the epoch after that of its checkpoint, on any number of ranks. The digits come with
scikit-learn, the bar with tqdm. `train_torch.py` is the same program with PyTorch.
"""

import argparse
import math
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from tqdm import tqdm

import arraycomm as ac

Array = NDArray[np.float64]
Tree = dict[str, Array]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--stop-after", type=int, metavar="EPOCH", help="end the program early")
    parser.add_argument("--batch", type=int, default=96, help="digits in a batch, over all ranks")
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--precision", choices=["float16", "float64"], default="float16")
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.pickle"))
    return parser.parse_args(arguments)


def read_digits() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the digits to train on, and those to validate with; every rank has all of them."""
    pixels, labels = load_digits(return_X_y=True)
    x = pixels / 16
    return {"x": x[:1500], "y": labels[:1500]}, {"x": x[1500:], "y": labels[1500:]}


# The network, and its gradient


def initial_parameters(seed: int) -> Tree:
    random = np.random.default_rng(seed)
    return {
        "hidden": random.normal(size=(64, 128)) / 8,
        "offset": np.zeros(128),
        "output": random.normal(size=(128, 10)) / 12,
    }


def evaluate(params: Tree, batch: Any) -> tuple[Array, Tree]:
    """Return the sums of a batch (losses, right answers, weights), and the gradient of the first."""
    items, weights = batch
    x, y = items["x"], items["y"]
    rows = np.arange(len(y))

    hidden = np.maximum(x @ params["hidden"] + params["offset"], 0)
    logits = hidden @ params["output"]
    logits -= logits.max(axis=1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    right = logits.argmax(axis=1) == y
    sums = np.array([-(weights * logs[rows, y]).sum(), (weights * right).sum(), weights.sum()])

    # Backward through the softmax, the output, the maximum with zero.
    slope = np.exp(logs)
    slope[rows, y] -= 1
    slope *= weights[:, None]
    inner = (slope @ params["output"].T) * (hidden > 0)
    return sums, {"hidden": x.T @ inner, "offset": inner.sum(axis=0), "output": hidden.T @ slope}


# An optimizer is any object with update(params, grads)


class Adam:
    """Adam with gradients clipped to a norm; `rate` may be set before each update."""

    def __init__(self, params: Tree, clip: float) -> None:
        self.rate, self.clip, self.steps = 0.0, clip, 0
        self.first = {name: np.zeros_like(array) for name, array in params.items()}
        self.second = {name: np.zeros_like(array) for name, array in params.items()}

    def update(self, params: Tree, grads: Tree) -> Tree:
        self.steps += 1
        norm = math.sqrt(sum((grad**2).sum() for grad in grads.values()))
        factor = min(1.0, self.clip / (norm + 1e-6))
        return {
            name: param - self.rate * self._direction(name, factor * grads[name])
            for name, param in params.items()
        }

    def _direction(self, name: str, grad: Array) -> Array:
        self.first[name] = 0.9 * self.first[name] + 0.1 * grad
        self.second[name] = 0.999 * self.second[name] + 0.001 * grad**2
        mean = self.first[name] / (1 - 0.9**self.steps)
        square = self.second[name] / (1 - 0.999**self.steps)
        return mean / (np.sqrt(square) + 1e-8)


def rate_at(step: int, steps: int, highest: float) -> float:
    """Return a rate that rises during the first tenth of the steps, and then falls to zero."""
    rising = steps // 10
    if step < rising:
        return highest * (0.1 + 0.9 * step / rising)
    return highest * 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


# Training


def means_over_ranks(sums: Array) -> Any:
    """Return the means over the digits of all ranks; a rank that has none does not count."""
    lost, right, weight = map(float, sums)
    means = {"loss": lost / max(weight, 1), "accuracy": right / max(weight, 1)}
    return ac.mean_metrics(means, weight=weight)


def save(path: Path, state: Any) -> None:
    """Write a checkpoint; if the program is stopped meanwhile, the one before is still there."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(state))
    os.replace(unfinished, path)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)

    # Every rank runs this whole program. It is one of several under `arraycomm run`, and otherwise the only one.
    comm = ac.init()
    if options.batch % comm.size:
        raise SystemExit(f"--batch must be a multiple of the {comm.size} ranks")

    # Each epoch has a new order of the digits, of which each rank takes its share.
    digits, others = read_digits()
    share = ac.DistributedDataContainer(digits, shuffle=True, seed=1)
    validation = ac.DistributedDataContainer(others)
    per_rank = options.batch // comm.size
    steps = options.epochs * share.num_batches(per_rank)

    # Rank 0 alone reads the checkpoint, or draws parameters. The other ranks pass None, and get it all.
    state = None
    if comm.rank == 0 and options.checkpoint.exists():
        state = pickle.loads(options.checkpoint.read_bytes())
    elif comm.rank == 0:
        params = initial_parameters(seed=0)
        state = params, vars(Adam(params, options.clip)), share.state_dict()
    params, attributes, seen = ac.synchronize(state)
    adam = Adam(params, options.clip)
    vars(adam).update(attributes)
    share.load_state_dict(seen)

    # From now on, update() first adds up the gradients of all ranks, which are sent as 16 bits.
    compression = "float16" if options.precision == "float16" else None
    optimizer = ac.DistributedOptimizer(adam, op="sum", compression=compression)

    for epoch in range(share.epoch, min(options.epochs, options.stop_after or options.epochs)):
        trained, validated = np.zeros(3), np.zeros(3)

        # The bar is on rank 0, if that writes to a terminal.
        bar = tqdm(share.batches(per_rank), leave=False, disable=None if comm.rank == 0 else True)
        for batch in bar:
            sums, grads = evaluate(params, batch)
            trained += sums
            # The last batch is shorter on some ranks, so each divides by the weight of the batch of all.
            total = comm.allreduce(float(sums[2]))
            grads = {name: grad / total for name, grad in grads.items()}
            optimizer.rate = rate_at(optimizer.steps, steps, options.rate)
            params = optimizer.update(params, grads)

        for batch in validation.batches(100):
            validated += evaluate(params, batch)[0]

        train, valid = means_over_ranks(trained), means_over_ranks(validated)
        ac.println(
            f"epoch {epoch + 1}: loss {train['loss']:.6f}, rate {optimizer.rate:.6f}, "
            f"validation loss {valid['loss']:.6f}, accuracy {valid['accuracy']:.4f}",
            ranks=0,
        )
        # The checkpoint says which epoch comes next. All ranks have the same, so one writes it.
        share.set_epoch(epoch + 1)
        if comm.rank == 0:
            save(options.checkpoint, (params, vars(adam), share.state_dict()))


if __name__ == "__main__":
    main()
