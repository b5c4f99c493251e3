"""Torch's own optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import arraycomm as ac
from arraycomm.testing import run
from tests.adapters.gradients import SIZES, STEPS, Gradients, gradients, reduced, zeros

torch = pytest.importorskip("torch")

Make = Callable[[list[Any]], Any]


def sgd(parameters: list[Any]) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: list[Any]) -> Any:
    """With an epsilon so large that the size of the gradients matters, not their sign alone."""
    return torch.optim.Adam(parameters, lr=0.1, eps=0.1)


def make_parameters() -> list[Any]:
    return [torch.nn.Parameter(torch.from_numpy(array)) for array in zeros().values()]


def step(optimizer: Any, parameters: list[Any], grads: dict[str, Any]) -> None:
    for parameter, grad in zip(parameters, grads.values(), strict=True):
        parameter.grad = None if grad is None else torch.from_numpy(grad.copy())
    optimizer.step()


def arrays(parameters: list[Any]) -> Gradients:
    return {
        name: parameter.detach().numpy()
        for name, parameter in zip(("a", "b"), parameters, strict=True)
    }


def plain_result(make: Make, size: int, op: str) -> Gradients:
    parameters = make_parameters()
    optimizer = make(parameters)
    for number in range(STEPS):
        step(optimizer, parameters, reduced(size, number, op))
    return arrays(parameters)


def assert_same(got: Gradients, expected: Gradients) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], strict=True)


@pytest.mark.parametrize("make", [sgd, adam])
def test_the_wrapped_optimizer_is_the_plain_one_with_its_state(make: Make) -> None:
    def wrap(comm: ac.Communicator) -> None:
        optimizer = make(make_parameters())
        state = optimizer.state_dict()
        assert ac.DistributedOptimizer(optimizer, comm=comm) is optimizer
        assert optimizer.state_dict() == state

    run(2, wrap)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("make", [sgd, adam])
def test_a_step_is_the_plain_one_with_the_reduced_gradients(make: Make, op: str, size: int) -> None:
    def train(comm: ac.Communicator) -> Gradients:
        parameters = make_parameters()
        optimizer = ac.DistributedOptimizer(make(parameters), comm=comm, op=op)
        for number in range(STEPS):
            step(optimizer, parameters, gradients(comm.rank, number))
        return arrays(parameters)

    expected = plain_result(make, size, op)
    for params in run(size, train):
        assert_same(params, expected)


def test_small_buckets_change_nothing() -> None:
    def train(comm: ac.Communicator) -> Gradients:
        parameters = make_parameters()
        optimizer = ac.DistributedOptimizer(sgd(parameters), comm=comm, bucket_bytes=1)
        for number in range(STEPS):
            step(optimizer, parameters, gradients(comm.rank, number))
        return arrays(parameters)

    expected = plain_result(sgd, 3, "mean")
    for params in run(3, train):
        assert_same(params, expected)


def test_after_a_step_the_gradients_are_the_reduced_ones() -> None:
    def train(comm: ac.Communicator) -> Gradients:
        parameters = make_parameters()
        optimizer = ac.DistributedOptimizer(sgd(parameters), comm=comm)
        step(optimizer, parameters, gradients(comm.rank, 0))
        return arrays([parameter.grad for parameter in parameters])

    for grads in run(3, train):
        assert_same(grads, reduced(3, 0, "mean"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_made_before_or_after_wrapping_works(when: str) -> None:
    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    def train(comm: ac.Communicator) -> Gradients:
        parameters = make_parameters()
        optimizer = sgd(parameters)
        scheduler = schedule(optimizer) if when == "before" else None
        optimizer = ac.DistributedOptimizer(optimizer, comm=comm)
        scheduler = scheduler or schedule(optimizer)
        for number in range(STEPS):
            step(optimizer, parameters, gradients(comm.rank, number))
            scheduler.step()
        return arrays(parameters)

    parameters = make_parameters()
    plain = sgd(parameters)
    scheduler = schedule(plain)
    for number in range(STEPS):
        step(plain, parameters, reduced(2, number, "mean"))
        scheduler.step()
    for params in run(2, train):
        assert_same(params, arrays(parameters))


def test_a_state_that_was_loaded_keeps_the_optimizer_distributed() -> None:
    def train(comm: ac.Communicator) -> Gradients:
        parameters = make_parameters()
        optimizer = ac.DistributedOptimizer(sgd(parameters), comm=comm)
        optimizer.load_state_dict(optimizer.state_dict())
        for number in range(STEPS):
            step(optimizer, parameters, gradients(comm.rank, number))
        return arrays(parameters)

    expected = plain_result(sgd, 2, "mean")
    for params in run(2, train):
        assert_same(params, expected)


@pytest.mark.parametrize("missing", range(3))
def test_a_gradient_missing_on_one_rank_counts_as_zeros(missing: int) -> None:
    def train(comm: ac.Communicator) -> Gradients:
        parameters = make_parameters()
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        ac.DistributedOptimizer(optimizer, comm=comm, op="sum")
        grads: dict[str, Any] = dict(gradients(comm.rank, 0))
        if comm.rank == missing:
            grads["a"] = None
        step(optimizer, parameters, grads)
        return arrays(parameters)

    first, second = (gradients(rank, 0)["a"] for rank in range(3) if rank != missing)
    for params in run(3, train):
        np.testing.assert_array_equal(params["a"], -(first + second))
        np.testing.assert_array_equal(params["b"], -reduced(3, 0, "sum")["b"])


def test_a_gradient_missing_on_all_ranks_stays_none() -> None:
    def train(comm: ac.Communicator) -> tuple[Any, Gradients]:
        parameters = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.zeros(4))]
        # Weight decay would move a parameter whose gradient is zeros instead of None.
        optimizer = torch.optim.SGD(parameters, lr=1.0, weight_decay=0.5)
        ac.DistributedOptimizer(optimizer, comm=comm)
        step(optimizer, parameters, {"a": None, "b": gradients(comm.rank, 0)["b"]})
        return parameters[0].grad, arrays(parameters)

    for grad, params in run(3, train):
        assert grad is None
        np.testing.assert_array_equal(params["a"], np.ones(4, np.float32))
        np.testing.assert_array_equal(params["b"], -reduced(3, 0, "mean")["b"])


def test_gradients_of_a_backward_pass_are_reduced() -> None:
    def train(comm: ac.Communicator) -> NDArray[np.float32]:
        (weight,) = parameters = [torch.nn.Parameter(torch.zeros(4))]
        optimizer = ac.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), comm=comm)
        optimizer.zero_grad()
        (weight * torch.from_numpy(gradients(comm.rank, 0)["a"])).sum().backward()
        optimizer.step()
        result: NDArray[np.float32] = weight.detach().numpy()
        return result

    for weight in run(3, train):
        np.testing.assert_array_equal(weight, -reduced(3, 0, "mean")["a"])


class LeastSquares:
    """Ten equations in four unknowns for each rank, none like another's."""

    def __init__(self, rank: int) -> None:
        random = np.random.default_rng(rank)
        self.matrix = random.normal(size=(10, 4))
        self.right = random.normal(size=10)

    def minimize(self, make: Callable[[list[Any]], Any]) -> tuple[NDArray[np.float64], float]:
        """Return the solution, and the loss that the first step returned."""
        unknowns = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        matrix, right = torch.from_numpy(self.matrix), torch.from_numpy(self.right)
        optimizer = make([unknowns])

        def closure() -> Any:
            optimizer.zero_grad()
            loss = ((matrix @ unknowns - right) ** 2).sum()
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(4)]
        return unknowns.detach().numpy(), losses[0]


def lbfgs(parameters: list[Any]) -> Any:
    """To the end: the default tolerances stop early."""
    return torch.optim.LBFGS(
        parameters, line_search_fn="strong_wolfe", tolerance_grad=1e-12, tolerance_change=1e-15
    )


def test_lbfgs_solves_the_problem_of_all_ranks_together() -> None:
    def train(comm: ac.Communicator) -> tuple[NDArray[np.float64], float]:
        return LeastSquares(comm.rank).minimize(
            lambda parameters: ac.DistributedOptimizer(lbfgs(parameters), comm=comm)
        )

    results = run(3, train)
    problems = [LeastSquares(rank) for rank in range(3)]
    matrix = np.concatenate([problem.matrix for problem in problems])
    right = np.concatenate([problem.right for problem in problems])
    expected = np.linalg.lstsq(matrix, right)[0]
    for unknowns, loss in results:
        assert unknowns.tobytes() == results[0][0].tobytes()
        # A minimum is found to the root of eps: the loss is flat there.
        np.testing.assert_allclose(unknowns, expected, rtol=0, atol=np.sqrt(np.finfo(float).eps))
        assert loss == pytest.approx((right**2).sum() / 3, rel=1e-14)


def test_wrapping_twice_is_refused() -> None:
    def wrap_twice(comm: ac.Communicator) -> None:
        optimizer = ac.DistributedOptimizer(sgd(make_parameters()), comm=comm)
        with pytest.raises(ValueError, match="distributed already"):
            ac.DistributedOptimizer(optimizer, comm=comm)

    run(2, wrap_twice)


@pytest.mark.parametrize("op", ["max", "prod", "average", None])
def test_an_op_other_than_mean_and_sum_is_refused(op: Any) -> None:
    def wrap(comm: ac.Communicator) -> None:
        with pytest.raises(ValueError, match="DistributedOptimizer: op must be"):
            ac.DistributedOptimizer(sgd(make_parameters()), comm=comm, op=op)

    run(2, wrap)


def test_a_rank_without_any_gradient_steps_with_the_others() -> None:
    def step(comm: ac.Communicator) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        optimizer = ac.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), comm=comm, op="sum")
        if comm.rank == 1:
            weight.grad = torch.full((2,), 3.0, dtype=torch.bfloat16)
        optimizer.step()
        return weight.detach().tolist()

    assert run(3, step) == [[-3.0, -3.0]] * 3
