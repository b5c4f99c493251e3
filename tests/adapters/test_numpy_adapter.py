"""Optimizers that are plain objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import arraycomm as ac
from arraycomm.testing import run
from tests.adapters.gradients import SHAPE, SIZES, STEPS, Gradients, gradients, reduced, zeros


class SGD:
    def __init__(self, learning_rate: float = 0.1) -> None:
        self.learning_rate = learning_rate

    def update(self, params: Gradients, grads: dict[str, Any]) -> Gradients:
        return {
            name: param if grads[name] is None else param - self.learning_rate * grads[name]
            for name, param in params.items()
        }


class Adam:
    """With an epsilon so large that the size of the gradients matters, not their sign alone."""

    def __init__(self) -> None:
        self.count = 0
        self.first = zeros()
        self.second = zeros()

    def update(self, params: Gradients, grads: Gradients) -> Gradients:
        self.count += 1
        for name, grad in grads.items():
            self.first[name] = 0.9 * self.first[name] + 0.1 * grad
            self.second[name] = 0.99 * self.second[name] + 0.01 * grad**2
        return {name: param - 0.1 * self._direction(name) for name, param in params.items()}

    def _direction(self, name: str) -> NDArray[np.float32]:
        first = self.first[name] / (1 - 0.9**self.count)
        second = self.second[name] / (1 - 0.99**self.count)
        direction: NDArray[np.float32] = first / (np.sqrt(second) + 0.1)
        return direction


def assert_same(got: Gradients, expected: Gradients) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], strict=True)


def test_the_state_is_that_of_the_plain_optimizer() -> None:
    def wrapped_state(comm: ac.Communicator) -> tuple[Any, ...]:
        optimizer = ac.DistributedOptimizer(Adam(), comm=comm)
        return optimizer.count, optimizer.first, optimizer.second

    for count, first, second in run(2, wrapped_state):
        assert count == 0
        assert_same(first, zeros())
        assert_same(second, zeros())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("make", [SGD, Adam])
def test_an_update_is_the_plain_one_with_the_reduced_gradients(
    make: type[SGD | Adam], op: str, size: int
) -> None:
    def train(comm: ac.Communicator) -> Gradients:
        optimizer = ac.DistributedOptimizer(make(), comm=comm, op=op)
        params = zeros()
        for step in range(STEPS):
            params = optimizer.update(params, gradients(comm.rank, step))
        return params

    plain, expected = make(), zeros()
    for step in range(STEPS):
        expected = plain.update(expected, reduced(size, step, op))
    for params in run(size, train):
        assert_same(params, expected)


def test_the_mean_is_the_default() -> None:
    def train(comm: ac.Communicator) -> Gradients:
        optimizer = ac.DistributedOptimizer(SGD(), comm=comm)
        result: Gradients = optimizer.update(zeros(), gradients(comm.rank, 0))
        return result

    expected = SGD().update(zeros(), reduced(3, 0, "mean"))
    for params in run(3, train):
        assert_same(params, expected)


def test_the_gradients_passed_are_left_as_they_are() -> None:
    def train(comm: ac.Communicator) -> Gradients:
        passed = gradients(comm.rank, 0)
        ac.DistributedOptimizer(SGD(), comm=comm).update(zeros(), passed)
        return passed

    for rank, passed in enumerate(run(2, train)):
        assert_same(passed, gradients(rank, 0))


@pytest.mark.parametrize("through", ["wrapped", "plain"])
def test_a_learning_rate_set_later_counts(through: str) -> None:
    def train(comm: ac.Communicator) -> Gradients:
        plain = SGD(0.1)
        wrapped = ac.DistributedOptimizer(plain, comm=comm)
        (wrapped if through == "wrapped" else plain).learning_rate = 0.5
        assert plain.learning_rate == wrapped.learning_rate == 0.5
        result: Gradients = wrapped.update(zeros(), gradients(comm.rank, 0))
        return result

    expected = SGD(0.5).update(zeros(), reduced(2, 0, "mean"))
    for params in run(2, train):
        assert_same(params, expected)


@pytest.mark.parametrize("missing", range(3))
def test_a_gradient_missing_on_one_rank_counts_as_zeros(missing: int) -> None:
    def train(comm: ac.Communicator) -> Gradients:
        grads: dict[str, Any] = dict(gradients(comm.rank, 0))
        if comm.rank == missing:
            grads["a"] = None
        optimizer = ac.DistributedOptimizer(SGD(1.0), comm=comm, op="sum")
        result: Gradients = optimizer.update(zeros(), grads)
        return result

    first, second = (gradients(rank, 0)["a"] for rank in range(3) if rank != missing)
    for params in run(3, train):
        np.testing.assert_array_equal(params["a"], -(first + second))
        np.testing.assert_array_equal(params["b"], -reduced(3, 0, "sum")["b"])


def test_a_gradient_missing_on_all_ranks_stays_missing() -> None:
    def train(comm: ac.Communicator) -> Gradients:
        grads = gradients(comm.rank, 0) | {"a": None}
        result: Gradients = ac.DistributedOptimizer(SGD(1.0), comm=comm).update(zeros(), grads)
        return result

    for params in run(3, train):
        np.testing.assert_array_equal(params["a"], np.zeros(SHAPE, np.float32))
        np.testing.assert_array_equal(params["b"], -reduced(3, 0, "mean")["b"])


def test_further_arguments_reach_the_optimizer() -> None:
    class Scaled:
        def update(self, params: float, grads: float, factor: float, *, offset: float) -> float:
            return params - factor * grads + offset

    def train(comm: ac.Communicator) -> float:
        optimizer = ac.DistributedOptimizer(Scaled(), comm=comm, op="sum")
        result: float = optimizer.update(1.0, float(comm.rank), 2.0, offset=0.5)
        return result

    assert run(3, train) == [1.0 - 2.0 * 3.0 + 0.5] * 3


def test_wrapping_twice_is_refused() -> None:
    def wrap_twice(comm: ac.Communicator) -> None:
        wrapped = ac.DistributedOptimizer(SGD(), comm=comm)
        with pytest.raises(ValueError, match="distributed already"):
            ac.DistributedOptimizer(wrapped, comm=comm)

    run(2, wrap_twice)


@pytest.mark.parametrize("op", ["max", "prod", "average", None])
def test_an_op_other_than_mean_and_sum_is_refused(op: Any) -> None:
    def wrap(comm: ac.Communicator) -> None:
        with pytest.raises(ValueError, match="DistributedOptimizer: op must be"):
            ac.DistributedOptimizer(SGD(), comm=comm, op=op)

    run(2, wrap)


def test_an_object_without_update_is_refused() -> None:
    def wrap(comm: ac.Communicator) -> None:
        with pytest.raises(TypeError, match="method update"):
            ac.DistributedOptimizer(object(), comm=comm)

    run(2, wrap)


@pytest.mark.parametrize("name", ["grads", "gradients", "updates"])
def test_update_that_takes_gradients_first_is_refused(name: str) -> None:
    made = type("Mine", (), {})
    exec(f"def update(self, {name}, params): return params - {name}", scope := {})
    made.update = scope["update"]

    def check(comm: ac.Communicator) -> None:
        optimizer = made() if comm.rank == 0 else SGD()
        with pytest.raises((TypeError, ac.PeerError), match=f"Mine.update takes '{name}' first"):
            ac.DistributedOptimizer(optimizer, comm=comm)
        assert comm.allreduce(1) == comm.size

    run(2, check)
