"""Softmax regression in PyTorch."""

from __future__ import annotations

import torch

import arraycomm as ac
from arraycomm.cli.demo.data import Batch, Linear


class Trainer:
    """A model and its optimizer: distributed over `comm`, or alone without one."""

    def __init__(self, start: Linear, learning_rate: float, comm: ac.Communicator | None) -> None:
        classes, pixels = start.weight.shape
        self._model = torch.nn.Linear(pixels, classes)
        with torch.no_grad():
            self._model.weight.copy_(torch.from_numpy(start.weight))
            self._model.bias.copy_(torch.from_numpy(start.bias))
        self._optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self._model.parameters(), lr=learning_rate
        )
        if comm is not None:
            ac.synchronize(self._model, comm=comm)
            # The optimizer makes a communicator for the gradients, as JAX's does: if frameworks
            # differ between ranks, all of them have to take part in making it.
            self._optimizer = ac.DistributedOptimizer(self._optimizer, comm=comm, op="sum")

    def step(self, batch: Batch) -> float:
        """Learn from a batch; return the sum of its weighted losses."""
        losses = torch.nn.functional.cross_entropy(
            self._model(torch.from_numpy(batch.images)),
            torch.from_numpy(batch.labels).long(),
            reduction="none",
        )
        loss = (torch.from_numpy(batch.weights) * losses).sum()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item()

    def parameters(self) -> Linear:
        """Return the parameters as NumPy arrays."""
        return Linear(
            self._model.weight.detach().numpy().copy(), self._model.bias.detach().numpy().copy()
        )
