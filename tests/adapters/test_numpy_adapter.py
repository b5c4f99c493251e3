"""Optimizers that are plain objects."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.adapters.gradients import gradients, reduced, zeros
from tests.adapters.optimizer_contract import Batch, Driver, OptimizerContract, Tree, gradient_of
from tests.support.on_ranks import each_rank_of


class Own:
    """One optimizer of each kind of the contract, as a user would write it."""

    def __init__(self, kind: str = "sgd", params: Tree | None = None, clip: Any = None) -> None:
        self.kind, self.clip, self.rate, self.steps = kind, clip, 0.1, 0
        self.first = {name: np.zeros_like(array) for name, array in (params or {}).items()}
        self.second = {name: np.zeros_like(array) for name, array in (params or {}).items()}

    def update(self, params: Tree, grads: Tree) -> Tree:
        self.steps += 1
        grads = {name: grad for name, grad in grads.items() if grad is not None}
        if self.clip is not None:
            norm = np.sqrt(sum((grad**2).sum() for grad in grads.values()))
            assert norm > self.clip
            grads = {name: grad * (self.clip / norm) for name, grad in grads.items()}
        moved = {name: self._moved(name, params[name], grad) for name, grad in grads.items()}
        return params | moved

    def _moved(self, name: str, param: Any, grad: Any) -> Any:
        if self.kind == "sgd":
            return param - self.rate * grad
        if self.kind == "momentum":
            self.first[name] = 0.9 * self.first[name] + grad
            return param - self.rate * self.first[name]
        self.first[name] = 0.9 * self.first[name] + 0.1 * grad
        self.second[name] = 0.99 * self.second[name] + 0.01 * grad**2
        first = self.first[name] / (1 - 0.9**self.steps)
        second = self.second[name] / (1 - 0.99**self.steps)
        # With an epsilon so large that the size of the gradients matters, not their sign alone.
        return param * (1 - 0.1 * self.rate) - self.rate * first / (np.sqrt(second) + 0.1)


class NumpyDriver(Driver):
    """An object with `update`, which clips what it gets."""

    # What the object keeps to itself stays as it is on ranks that waited in a `join` block.
    kind_in_join = "sgd"
    shardable = False

    def make(self, params: Tree, kind: str) -> None:
        self.params = params
        self.optimizer: Any = Own(kind, params, self.clip)
        self.plain = self.optimizer

    def distribute(self, comm: ac.Communicator, options: dict[str, Any]) -> None:
        self.optimizer = ac.DistributedOptimizer(self.optimizer, comm=comm, **options)

    def apply(self, grads: Tree) -> None:
        self.params = self.optimizer.update(self.params, grads)

    def learn(self, part: Batch, factor: float) -> None:
        grads = gradient_of(self.params, part)
        self.apply({n: None if grad is None else factor * grad for n, grad in grads.items()})

    def set_rate(self, rate: float) -> None:
        self.optimizer.rate = rate

    def parameters(self) -> Tree:
        return copy.deepcopy(self.params)

    def state(self) -> Any:
        return copy.deepcopy([self.params, vars(self.plain)])

    def resume(self, saved: Any, comm: ac.Communicator) -> None:
        self.params, attributes = ac.synchronize(saved, comm=comm)
        vars(self.plain).update(attributes)

    def synchronize(self, root: int, comm: ac.Communicator) -> None:
        self.params, attributes = ac.synchronize(self.state(), root=root, comm=comm)
        vars(self.plain).update(attributes)

    def finish(self, joined: ac.Join) -> None:
        self.params = joined.synchronize(self.params)


class TestContract(OptimizerContract):
    driver = NumpyDriver


@pytest.mark.parametrize("through", ["wrapped", "plain"])
@each_rank_of(2)
def test_a_learning_rate_set_later_counts(comm: ac.Communicator, through: str) -> None:
    plain = Own()
    wrapped = ac.DistributedOptimizer(plain, comm=comm)
    (wrapped if through == "wrapped" else plain).rate = 0.5
    assert plain.rate == wrapped.rate == 0.5
    params = wrapped.update(zeros(), gradients(comm.rank, 0))["a"]
    np.testing.assert_array_equal(params, -0.5 * reduced(2, 0, "mean")["a"], strict=True)


@each_rank_of(2)
def test_a_dataclass_that_was_synchronized_is_what_steps_depend_on(comm: ac.Communicator) -> None:
    @dataclass
    class Rated:
        rate: float

        def update(self, params: Any, grads: Any) -> Any:
            if comm.rank and grads[0] > 1:
                raise FloatingPointError("too large")
            return params - self.rate * grads

    optimizer, params = ac.DistributedOptimizer(Rated(1.0 + comm.rank), comm=comm), np.zeros(2)
    params, optimizer = ac.synchronize((params, optimizer), comm=comm)
    with suppress(FloatingPointError):
        params = optimizer.update(params, np.full(2, 2.0))
    params, optimizer = ac.synchronize((params, optimizer), comm=comm)
    assert optimizer.update(params, np.ones(2)).tolist() == [-3.0, -3.0]
    optimizer.rate = 1.0 + comm.rank
    with pytest.raises(ac.MismatchError, match="rate is not the same on all ranks"):
        optimizer.update(params, np.ones(2))


@each_rank_of(3)
def test_further_arguments_reach_the_optimizer(comm: ac.Communicator) -> None:
    class Scaled:
        def update(self, params: float, grads: float, factor: float, *, offset: float) -> float:
            return params - factor * grads + offset

    optimizer = ac.DistributedOptimizer(Scaled(), comm=comm, op="sum")
    result: float = optimizer.update(1.0, float(comm.rank), 2.0, offset=0.5)
    assert result == 1.0 - 2.0 * 3.0 + 0.5
