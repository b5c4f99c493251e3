"""Softmax regression in NumPy, with an optimizer for arrays of any framework."""

from __future__ import annotations

import numpy as np

import arraycomm as ac
from arraycomm.adapters.numpy import SGD
from arraycomm.cli.demo.data import Batch, Linear


class Trainer:
    """A model and its optimizer: distributed over `comm`, or alone without one."""

    def __init__(self, start: Linear, learning_rate: float, comm: ac.Communicator | None) -> None:
        self._params = start
        self._optimizer = SGD(learning_rate)
        if comm is not None:
            self._params = ac.synchronize(self._params, comm=comm)
            # The optimizer makes a communicator for the gradients, as JAX's does: if frameworks
            # differ between ranks, all of them have to take part in making it.
            self._optimizer = ac.DistributedOptimizer(self._optimizer, comm=comm, op="sum")

    def step(self, batch: Batch) -> float:
        """Learn from a batch; return the sum of its weighted losses."""
        logits = batch.images @ self._params.weight.T + self._params.bias
        logits -= logits.max(axis=1, keepdims=True)
        log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        rows = np.arange(len(batch.labels))
        loss = -(batch.weights * log_probabilities[rows, batch.labels]).sum()

        slopes = np.exp(log_probabilities)
        slopes[rows, batch.labels] -= 1
        slopes *= batch.weights[:, None]
        grads = [slopes.T @ batch.images, slopes.sum(axis=0)]
        # A list, as the other frameworks have it.
        self._params = Linear(*self._optimizer.update(list(self._params), grads))
        return float(loss)

    def parameters(self) -> Linear:
        """Return the parameters as NumPy arrays."""
        return self._params
