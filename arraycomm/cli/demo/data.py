"""The demonstration's data and model, before any framework sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arraycomm import Communicator, DistributedDataContainer

GLOBAL_BATCH: Final = 128
PIXELS: Final = 64
CLASSES: Final = 10
_SPLIT_SEED: Final = 0
_ORDER_SEED: Final = 1
_TEST_SHARE: Final = 0.2

Sample = tuple[NDArray[np.float32], int]


class Linear(NamedTuple):
    """The parameters of softmax regression, named and laid out as in `torch.nn.Linear`."""

    weight: Any
    bias: Any


class Batch(NamedTuple):
    """One rank's part of a global batch.

    The number of images is the same in every batch, so that JAX compiles one program: if this rank
    has fewer, images of weight 0 follow. The others weigh 1 / (size of the global batch), so that
    the weighted losses of all ranks add up to the mean over the global batch, however unevenly it
    is distributed.
    """

    images: NDArray[np.float32]
    labels: NDArray[np.int32]
    weights: NDArray[np.float32]


def load_digits() -> tuple[list[Sample], list[Sample]]:
    """Return the images (64 pixels from 0 to 1) to train on and those to test with."""
    from sklearn.datasets import load_digits as load
    from sklearn.model_selection import train_test_split

    images, labels = load(return_X_y=True)
    samples = [
        (image.astype(np.float32) / 16, int(label))
        for image, label in zip(images, labels, strict=True)
    ]
    train, test = train_test_split(
        samples, test_size=_TEST_SHARE, random_state=_SPLIT_SEED, stratify=labels
    )
    return train, test


def initial_parameters(seed: int) -> Linear:
    """Return small random parameters to start from."""
    random = np.random.default_rng(seed)
    weight = random.normal(scale=0.1, size=(CLASSES, PIXELS)).astype(np.float32)
    return Linear(weight, np.zeros(CLASSES, np.float32))


def distribute(samples: Sequence[Sample], comm: Communicator) -> DistributedDataContainer:
    """Return this rank's samples, in a new random order for each epoch."""
    return DistributedDataContainer(samples, comm=comm, shuffle=True, seed=_ORDER_SEED)


def steps_per_epoch(count: int) -> int:
    """Return the number of global batches of `count` samples; the last one may be short."""
    return -(-count // GLOBAL_BATCH)


def batches(container: DistributedDataContainer, count: int, comm: Communicator) -> Iterator[Batch]:
    """Yield this rank's part of each global batch of the `count` samples."""
    for start in range(0, count, GLOBAL_BATCH):
        stop = min(start + GLOBAL_BATCH, count)
        samples = container[_local(start, comm) : _local(stop, comm)]
        yield _batch(samples, stop - start, -(-GLOBAL_BATCH // comm.size))


def _local(position: int, comm: Communicator) -> int:
    """Return how many of the first `position` samples of the global order this rank has.

    Sample i of the global order is the container's item i // size on rank i mod size.
    """
    return -((comm.rank - position) // comm.size)


def _batch(samples: Sequence[Sample], global_size: int, room: int) -> Batch:
    """Return a batch of `room` images, of which the first are the samples."""
    batch = Batch(
        np.zeros((room, PIXELS), np.float32), np.zeros(room, np.int32), np.zeros(room, np.float32)
    )
    for row, (image, label) in enumerate(samples):
        batch.images[row], batch.labels[row] = image, label
    batch.weights[: len(samples)] = 1 / global_size
    return batch
