"""A data-parallel training loop over mpi4py, with a mistake that tests find: see docs/library-tests.md."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def gradients(w: dict[str, Array], x: Array, y: Array) -> dict[str, Array]:
    """Return the gradients of the mean squared error over some samples; zeros if there are none."""
    error = x @ w["slope"] + w["offset"] - y
    count = max(len(x), 1)
    return {"slope": 2 * x.T @ error / count, "offset": 2 * error.sum(keepdims=True) / count}


def train(comm: Any, x: Array, y: Array, batch: int, rate: float = 0.25) -> dict[str, Array]:
    """Go once through all samples; `comm` is mpi4py's, `batch` the samples of a rank in a step."""
    rank, size = comm.Get_rank(), comm.Get_size()
    w = {"slope": np.zeros(x.shape[1]), "offset": np.zeros(1)}
    for step in range(ceil(len(x) / (batch * size))):
        own = slice((step * size + rank) * batch, (step * size + rank + 1) * batch)
        for name, gradient in gradients(w, x[own], y[own]).items():
            total = np.empty_like(gradient)
            comm.Allreduce(gradient, total)
            w[name] -= rate * total / size
    return w


def train_by_samples(
    comm: Any, x: Array, y: Array, batch: int, rate: float = 0.25
) -> dict[str, Array]:
    """Do the same, with every sample counting alike."""
    rank, size = comm.Get_rank(), comm.Get_size()
    w = {"slope": np.zeros(x.shape[1]), "offset": np.zeros(1)}
    for step in range(ceil(len(x) / (batch * size))):
        own = slice((step * size + rank) * batch, (step * size + rank + 1) * batch)
        together = len(x[step * size * batch : (step + 1) * size * batch])
        for name, gradient in gradients(w, x[own], y[own]).items():
            total = np.empty_like(gradient)
            comm.Allreduce(gradient * len(x[own]), total)
            w[name] -= rate * total / together
    return w
