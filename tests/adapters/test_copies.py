"""Copies of distributed optimizers are distributed; pickles of them are refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.support.on_ranks import each_rank_of

Copier = Callable[[Any], Any]
COPIERS: dict[str, Copier] = {"copy": copy.copy, "deepcopy": copy.deepcopy}


class Plain:
    """An optimizer that says itself how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Plain:
        return Plain()

    def update(self, params: Any, grads: Any) -> Any:
        return params - grads


def optax_step(comm: ac.Communicator, copier: Copier, **options: Any) -> Callable[[float], float]:
    optax = pytest.importorskip("optax")
    optimizer = copier(ac.DistributedOptimizer(optax.sgd(1.0), comm=comm, **options))
    parameters = np.zeros(1, np.float32)
    state = optimizer.init(parameters)

    def step(gradient: float) -> float:
        nonlocal parameters, state
        changes, state = optimizer.update(np.full(1, gradient, np.float32), state, parameters)
        parameters = parameters + np.asarray(changes)
        return float(parameters[0])

    return step


def plain_step(comm: ac.Communicator, copier: Copier, **options: Any) -> Callable[[float], float]:
    optimizer = copier(ac.DistributedOptimizer(Plain(), comm=comm, **options))
    parameters = np.zeros(1)

    def step(gradient: float) -> float:
        nonlocal parameters
        parameters = optimizer.update(parameters, np.full(1, gradient))
        return float(parameters[0])

    return step


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("how", COPIERS)
@pytest.mark.parametrize("stepping", [optax_step, plain_step])
@each_rank_of(3)
def test_a_copy_reduces_its_gradients(
    comm: ac.Communicator, stepping: Any, how: str, accumulate: int
) -> None:
    want = [-2.0, -4.0] if accumulate == 1 else [0.0, -2.0, -2.0, -4.0]
    step = stepping(comm, COPIERS[how], accumulate=accumulate)
    assert [step(comm.rank + 1.0) for _ in range(2 * accumulate)] == want


@each_rank_of(2)
def test_a_copy_and_its_original_do_not_share_gradients(comm: ac.Communicator) -> None:
    original = ac.DistributedOptimizer(Plain(), comm=comm, accumulate=2)
    assert original.update(0.0, 1.0) == 0.0
    copied = copy.deepcopy(original)
    assert copied.update(0.0, 3.0) == -2.0
    assert original.update(0.0, 5.0) == -3.0


@each_rank_of(2)
def test_a_copy_of_a_torch_optimizer_is_not_distributed_twice(comm: ac.Communicator, torch) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    optimizer = ac.DistributedOptimizer(torch.optim.SGD(parameters, 0.1), comm=comm)
    again = copy.deepcopy(copy.copy(optimizer))
    assert again.state_dict() == optimizer.state_dict()
    with pytest.raises(ValueError, match="distributed already"):
        ac.DistributedOptimizer(again, comm=comm)


@each_rank_of(2)
def test_a_copy_in_join_is_refused(comm: ac.Communicator) -> None:
    copied = copy.copy(ac.DistributedOptimizer(Plain(), comm=comm))
    with ac.join(comm), pytest.raises(ValueError, match="inside join a copy of a distributed"):
        copied.update(0.0, 1.0)


def distributed(comm: ac.Communicator, kind: str) -> Any:
    if kind == "torch":
        torch = pytest.importorskip("torch")
        plain = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    elif kind == "optax":
        plain = pytest.importorskip("optax").adam(0.1)
    else:
        plain = Plain()
    return ac.DistributedOptimizer(plain, comm=comm)


@pytest.mark.parametrize("kind", ["torch", "optax", "object"])
@each_rank_of(2)
def test_a_distributed_optimizer_cannot_be_pickled(comm: ac.Communicator, kind: str) -> None:
    optimizer = distributed(comm, kind)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=r"distributed \w+ cannot be pickled.*; (save|pickle)"):
            pickle.dumps({"optimizer": optimizer}, protocol)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        with pytest.raises(TypeError, match=r"save its state \(state_dict\(\) in torch\)"):
            torch.save(optimizer, io.BytesIO())
        torch.save(optimizer.state_dict(), io.BytesIO())


@each_rank_of(2)
def test_what_stands_for_ranks_is_its_own_copy_and_cannot_be_pickled(comm: ac.Communicator) -> None:
    request = comm.iallreduce(1)
    for thing in (comm, comm.plan([0.0]), request, ac.join(comm)):
        assert copy.copy(thing) is thing
        assert copy.deepcopy({"trainer": thing})["trainer"] is thing
        name = type(thing).__name__
        with pytest.raises(TypeError, match=f"a {name} cannot be pickled, .*; (make|wait|call)"):
            pickle.dumps([thing])
    assert request.wait() == comm.size
