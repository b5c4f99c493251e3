"""Optimizers that are plain objects."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.adapters.gradients import gradients, reduced, zeros
from tests.support.on_ranks import each_rank_of


class Own:
    """An optimizer as a user would write it."""

    def __init__(self) -> None:
        self.rate = 0.1

    def update(self, params: Any, grads: Any) -> Any:
        return {name: params[name] - self.rate * grad for name, grad in grads.items()}


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
