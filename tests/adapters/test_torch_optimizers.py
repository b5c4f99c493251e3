"""Every optimizer of `torch.optim`: ranks with a part of the batch against one process with all of it."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.support.on_ranks import each_rank_of

torch = pytest.importorskip("torch")

# Torch's own, on its import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
# SparseAdam takes sparse gradients alone, which are refused.
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in {"Optimizer", "SparseAdam"}
)
OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "foreach": {"foreach": True},
    "one by one": {"foreach": False},
    "fused": {"fused": True},
    "maximize": {"maximize": True},
}
WAYS = ("eager", "compiled")
ROWS, STEPS = 8, 3


def _takes(name: str, option: str) -> bool:
    return set(OPTIONS[option]) <= set(inspect.signature(getattr(torch.optim, name)).parameters)


# Each as it is, and with one of the options.
CASES = [
    (name, option, WAYS[number % 2])
    for number, (row, name) in enumerate(itertools.product(range(2), OPTIMIZERS))
    if _takes(name, option := list(OPTIONS)[row and 1 + number % 4])
]


def _model(name: str) -> Any:
    # Muon is for matrices.
    layers = torch.nn.Embedding(ROWS, 4), torch.nn.Linear(4, 3, bias=name != "Muon")
    for parameter in (p for layer in layers for p in layer.parameters()):
        shape = parameter.shape
        parameter.data = torch.arange(1.0, 1 + shape.numel()).reshape(shape).sin() / 2
    return torch.nn.Sequential(*layers)


def _train(model: Any, optimizer: Any, rows: Any, *, compiled: bool) -> list[Any]:
    """Return the parameters after steps, each with half of the data."""
    run = torch.compile(model, backend="eager") if compiled else model
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(STEPS):

        def loss(step: int = step) -> Any:
            optimizer.zero_grad()
            made = (run(rows[step % 2 :: 2]) ** 2).mean()
            made.backward()
            return made

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
        scheduler.step()
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


@pytest.mark.parametrize(("name", "option", "way"), CASES)
@each_rank_of(2)
def test_ranks_train_as_one_process(
    comm: ac.Communicator, name: str, option: str, way: str
) -> None:
    made, rows = [], torch.arange(ROWS)
    # Each rank has half of the rows of each step.
    own = rows.reshape(2, 2, 2)[:, comm.rank].reshape(-1)
    own = torch.stack([own[:2], own[2:]], 1).reshape(-1)
    whole = torch.stack([rows[:4], rows[4:]], 1).reshape(-1)
    for distributed in (True, False):
        model = _model(name)
        optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIONS[option])
        optimizer.state["turns"] = 0  # of no parameter
        if distributed:
            optimizer = ac.DistributedOptimizer(optimizer, comm=comm)
        data = own if distributed else whole
        made.append(_train(model, optimizer, data, compiled=way == "compiled"))
    before = [parameter.detach().numpy() for parameter in _model(name).parameters()]
    for found, expected, first in zip(*made, before, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert not np.array_equal(found, first)
