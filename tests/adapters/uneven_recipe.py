"""Training on uneven data by the documented recipe, and by one process on the same global batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

import arraycomm as ac
from arraycomm.adapters.torch import DataLoader

COUNT, EPOCHS, SEED = 65, 2, 7

_random = np.random.default_rng(0)
X = torch.from_numpy(_random.normal(size=(COUNT, 3)))
Y = torch.from_numpy(_random.normal(size=(COUNT, 1)))
DATA = TensorDataset(X, Y, torch.arange(COUNT))


class Trained(NamedTuple):
    """Parameters, the mean loss of each epoch, and the items that counted in each."""

    parameters: list[Any]
    losses: list[float]
    items: list[list[int]]


def make_model() -> Any:
    # Rank threads share torch's generator, so nothing is drawn here.
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.25)
    return model


def make_optimizer(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def errors(model: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.mse_loss(model(x), y, reduction="none").sum(dim=1)


def train(comm: ac.Communicator, uneven: str, batch: int, **options: Any) -> Trained:
    """Train as docs/data.md says."""
    model = make_model()
    optimizer = ac.DistributedOptimizer(make_optimizer(model), comm=comm, op="sum")
    share = ac.DistributedDataContainer(DATA, comm=comm, shuffle=True, seed=SEED, uneven=uneven)
    loader = DataLoader(share, batch, **options)
    losses, items = [], []
    for epoch in range(EPOCHS):
        share.set_epoch(epoch)
        lost, counted, seen = torch.tensor(0.0), torch.tensor(0.0), []
        for (x, y, number), weights in loader:
            total = comm.allreduce(weights.sum())
            part = (weights * errors(model, x, y)).sum()
            optimizer.zero_grad()
            (part / total).backward()
            optimizer.step()
            lost, counted = lost + part.detach(), counted + weights.sum()
            seen += number[weights > 0].tolist()
        mean = ac.mean_metrics({"loss": lost / counted}, counted.item(), comm=comm)
        losses.append(mean["loss"].item())
        items.append(seen)
    return Trained([p.detach() for p in model.parameters()], losses, items)


def train_alone(size: int, uneven: str, batch: int) -> Trained:
    """Train in one process on the whole of each global batch."""
    model = make_model()
    optimizer = make_optimizer(model)
    losses, items = [], []
    for order in orders():
        kept = order[: COUNT - COUNT % size if uneven == "drop" else COUNT]
        lost = 0.0
        for own in torch.tensor(kept).split(batch * size):
            part = errors(model, X[own], Y[own])
            optimizer.zero_grad()
            part.mean().backward()
            optimizer.step()
            lost += part.sum().item()
        losses.append(lost / len(kept))
        items.append(kept)
    return Trained([p.detach() for p in model.parameters()], losses, items)


def orders() -> list[list[int]]:
    """Return the items of each epoch in the order of one rank."""

    def order(comm: ac.Communicator) -> list[list[int]]:
        share = ac.DistributedDataContainer(range(COUNT), comm=comm, shuffle=True, seed=SEED)
        found = []
        for epoch in range(EPOCHS):
            share.set_epoch(epoch)
            found.append(list(share))
        return found

    from arraycomm.testing import run

    return run(1, order)[0]


def assert_equal_to_one_process(ranks: list[Trained], uneven: str, batch: int) -> None:
    """Fail unless the ranks have the same parameters, and those of one process.

    Of the two sums of a batch, in different orders, each errs by at most a rounding for each item; so
    do the parameters after each step, and no step enlarges the difference.
    """
    alone = train_alone(len(ranks), uneven, batch)
    steps = EPOCHS * -(-COUNT // (batch * len(ranks)))
    tolerance = 2 * COUNT * steps * np.finfo(np.float64).eps
    for rank in ranks:
        for got, first, wanted in zip(
            rank.parameters, ranks[0].parameters, alone.parameters, strict=True
        ):
            assert torch.equal(got, first)
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(rank.losses, alone.losses, rtol=tolerance)
    for epoch, wanted in enumerate(alone.items):
        assert sorted(i for rank in ranks for i in rank.items[epoch]) == sorted(wanted)
