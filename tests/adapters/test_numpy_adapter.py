"""Optimizers that are plain objects."""

from __future__ import annotations

import functools
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


def _sgd(params: Gradients, grads: Gradients, *, rate: float = 0.1) -> Gradients:
    return SGD(rate).update(params, grads)


class WithState:
    def update(self, params: Gradients, grads: Gradients, state: int) -> tuple[Gradients, int]:
        return SGD().update(params, grads), state + 1


class InPlace:
    def step(self, params: Gradients, grads: Gradients) -> None:
        for name in params:
            params[name] -= np.float32(0.1) * grads[name]


def _in_place(optimizer: Any, params: Gradients, grads: Gradients) -> Gradients:
    # A step that is only accumulated returns what it got.
    assert optimizer.step(params, grads) in (None, params)
    return params


class _Stepper:
    def step(self, params: Gradients, grads: Gradients) -> Gradients:
        return SGD().update(params, grads)


class _Called:
    def __call__(self, params: Gradients, grads: Gradients) -> Gradients:
        return SGD().update(params, grads)


# How each kind of optimizer is made, and called; the last entry of what it returns is the parameters.
PROTOCOL: dict[str, tuple[Any, Any]] = {
    "update": (SGD, lambda optimizer, *args: optimizer.update(*args)),
    "step": (_Stepper, lambda optimizer, *args: optimizer.step(*args)),
    "in place": (InPlace, _in_place),
    "state": (WithState, lambda optimizer, *args: optimizer.update(*args, 7)[0]),
    "state by name": (WithState, lambda optimizer, *args: optimizer.update(*args, state=7)[0]),
    "function": (lambda: _sgd, lambda optimizer, *args: optimizer(*args)),
    "partial": (lambda: functools.partial(_sgd, rate=0.1), lambda o, *args: o(*args)),
    "called object": (_Called, lambda optimizer, *args: optimizer(*args)),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", PROTOCOL)
def test_every_optimizer_of_the_protocol_gets_reduced_gradients(
    kind: str, accumulate: int, size: int
) -> None:
    make, step = PROTOCOL[kind]

    def train(comm: ac.Communicator) -> list[Gradients]:
        optimizer = ac.DistributedOptimizer(make(), comm=comm, accumulate=accumulate)
        params, seen = zeros(), []
        for number in range(2 * accumulate):
            params = step(optimizer, params, gradients(comm.rank, number // accumulate))
            seen.append({name: param.copy() for name, param in params.items()})
        return seen

    plain, expected = SGD(), zeros()
    results = run(size, train)
    for number in range(2 * accumulate):
        if number % accumulate == accumulate - 1:
            expected = plain.update(expected, reduced(size, number // accumulate, "mean"))
        for seen in results:
            assert_same(seen[number], expected)


class _NoArguments:
    def step(self) -> None: ...


class _Both:
    """Whose update alone follows the protocol."""

    def update(self, params: float, grads: float) -> float:
        return params - grads

    def step(self) -> None: ...


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (object(), r"update\(params, grads, state\) or step\(params, grads\), .*; got object"),
        (SGD, r"got the class SGD; pass an instance, SGD\(...\)"),
        ({}, "got dict"),
        (_NoArguments(), r"got _NoArguments.step\(\).*; wrap it in an object"),
        (lambda grads: grads, "takes 'grads' first"),
        (lambda params: params, r"<lambda>\(params\); wrap it"),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizer: Any, said: str) -> None:
    def wrap(comm: ac.Communicator) -> None:
        last = comm.rank == comm.size - 1
        with pytest.raises(TypeError if last else ac.PeerError, match=said):
            ac.DistributedOptimizer(optimizer if last else SGD(), comm=comm)
        assert comm.allreduce(1) == comm.size

    run(2, wrap)


def test_methods_that_do_not_follow_the_protocol_are_not_wrapped() -> None:
    def check(comm: ac.Communicator) -> None:
        optimizer = ac.DistributedOptimizer(_Both(), comm=comm, op="sum")
        assert optimizer.update(0.0, 1.0) == -comm.size
        assert not hasattr(ac.DistributedOptimizer(SGD(), comm=comm), "step")
        # Also if one rank alone calls it.
        if comm.rank == 0:
            with pytest.raises(TypeError, match=r"got _Both.step\(\)"):
                optimizer.step(0.0, 1.0)
        else:
            with pytest.raises(ac.PeerError, match=r"got _Both.step\(\)"):
                optimizer.update(0.0, 1.0)
        assert optimizer.update(0.0, 1.0) == -comm.size
        with pytest.raises(TypeError, match="_Both cannot be called; use its methods"):
            optimizer(0.0, 1.0)

    run(2, check)


def test_a_step_that_one_rank_has_not_taken_is_a_mismatch_on_all() -> None:
    class Checked:
        """Raises on rank 1 in the second step, and takes the others."""

        count = 0

        def update(self, params: float, grads: float, rank: int) -> float:
            self.count += 1
            if rank == 1 and self.count == 2:
                raise FloatingPointError("not finite")
            return params - grads

    def train(comm: ac.Communicator) -> None:
        optimizer, params = ac.DistributedOptimizer(Checked(), comm=comm), 0.0
        for step in range(2):
            try:
                params = optimizer.update(params, 1.0, comm.rank)
            except FloatingPointError:
                assert (comm.rank, step) == (1, 1)
        with pytest.raises(ac.MismatchError, match=r"steps in which the optimizer raised=1"):
            optimizer.update(params, 1.0, comm.rank)

    run(3, train)


def test_a_step_that_one_rank_leaves_out_is_an_error_on_all() -> None:
    def train(comm: ac.Communicator) -> None:
        optimizer = ac.DistributedOptimizer(SGD(), comm=comm)

        def loop(params: Gradients) -> None:
            for step in range(STEPS):
                if (comm.rank, step) != (1, 1):
                    params = optimizer.update(params, gradients(comm.rank, step))
                ac.mean_metrics(0.5, 1, comm=comm)

        # It waits for the others in the metrics, and they for it in the step.
        with pytest.raises(ac.DeadlockError):
            loop(zeros())

    run(3, train)


def test_a_step_that_all_ranks_have_not_taken_is_none_to_any() -> None:
    class Refusing:
        def update(self, params: float, grads: float) -> float:
            if params == 0:
                raise FloatingPointError("not finite")
            return params - grads

    def train(comm: ac.Communicator) -> float:
        optimizer = ac.DistributedOptimizer(Refusing(), comm=comm)
        with pytest.raises(FloatingPointError):
            optimizer.update(0.0, 1.0)
        result: float = optimizer.update(1.0, float(comm.rank))
        return result

    assert run(3, train) == [0.0] * 3


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


def test_an_optimizer_of_flax_changes_its_model_in_place() -> None:
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    # One after the other: threads that compile at the same time disturb one another.
    models = [nnx.Linear(2, 1, rngs=nnx.Rngs(0)) for _ in range(2)]
    start = np.asarray(models[0].kernel[...])
    slopes = [nnx.grad(lambda m, r=r: r * m.kernel[...].sum())(models[r]) for r in range(2)]

    def train(comm: ac.Communicator) -> Any:
        model = models[comm.rank]
        optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
        ac.DistributedOptimizer(optimizer, comm=comm).update(model, slopes[comm.rank])
        return np.asarray(model.kernel[...])

    for kernel in run(2, train):
        np.testing.assert_array_equal(kernel, start - np.float32(0.25))
