"""Which objects and functions are optimizers, how they are called, and steps that some ranks have not taken."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.adapters.gradients import STEPS, Gradients, gradients, reduced, zeros
from tests.support.on_ranks import each_rank_of


class SGD:
    def __init__(self, learning_rate: float = 0.1) -> None:
        self.learning_rate = learning_rate

    def update(self, params: Gradients, grads: dict[str, Any]) -> Gradients:
        return {
            name: param if grads[name] is None else param - self.learning_rate * grads[name]
            for name, param in params.items()
        }


def _sgd(params: Gradients, grads: Gradients, *, rate: float = 0.1) -> Gradients:
    return SGD(rate).update(params, grads)


class WithState:
    def update(self, params: Gradients, grads: Gradients, state: int) -> tuple[Gradients, int]:
        return SGD().update(params, grads), state + 1


class WithStateOfItsOwnName:
    def update(self, params: Gradients, grads: Gradients, opt_state: int) -> Any:
        return WithState().update(params, grads, opt_state)


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
    "state by its own name": (
        WithStateOfItsOwnName,
        lambda optimizer, *args: optimizer.update(*args, opt_state=7)[0],
    ),
    "function": (lambda: _sgd, lambda optimizer, *args: optimizer(*args)),
    "partial": (lambda: functools.partial(_sgd, rate=0.1), lambda o, *args: o(*args)),
    "called object": (_Called, lambda optimizer, *args: optimizer(*args)),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", PROTOCOL)
@each_rank_of(3)
def test_every_optimizer_of_the_protocol_gets_reduced_gradients(
    comm: ac.Communicator, kind: str, accumulate: int
) -> None:
    make, step = PROTOCOL[kind]
    optimizer = ac.DistributedOptimizer(make(), comm=comm, accumulate=accumulate)
    params, plain, expected = zeros(), SGD(), zeros()
    for number in range(2 * accumulate):
        params = step(optimizer, params, gradients(comm.rank, number // accumulate))
        if number % accumulate == accumulate - 1:
            expected = plain.update(expected, reduced(3, number // accumulate, "mean"))
        np.testing.assert_equal(params, expected)


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
        (lambda updates, params: params, "takes 'updates' first"),
        (lambda params: params, r"<lambda>\(params\); wrap it"),
    ],
)
@each_rank_of(2)
def test_what_is_no_optimizer_is_refused(comm: ac.Communicator, optimizer: Any, said: str) -> None:
    last = comm.rank == comm.size - 1
    with pytest.raises(TypeError if last else ac.PeerError, match=said):
        ac.DistributedOptimizer(optimizer if last else SGD(), comm=comm)
    assert comm.allreduce(1) == comm.size


@each_rank_of(2)
def test_methods_that_do_not_follow_the_protocol_are_not_wrapped(comm: ac.Communicator) -> None:
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


@each_rank_of(3)
def test_a_step_that_one_rank_has_not_taken_is_a_mismatch_on_all(comm: ac.Communicator) -> None:
    class Checked:
        """Raises on rank 1 in the second step, and takes the others."""

        count = 0

        def update(self, params: float, grads: float, rank: int) -> float:
            self.count += 1
            if rank == 1 and self.count == 2:
                raise FloatingPointError("not finite")
            return params - grads

    optimizer, params = ac.DistributedOptimizer(Checked(), comm=comm), 0.0
    for step in range(2):
        try:
            params = optimizer.update(params, 1.0, comm.rank)
        except FloatingPointError:
            assert (comm.rank, step) == (1, 1)
    with pytest.raises(ac.MismatchError, match=r"steps in which the optimizer raised=1"):
        optimizer.update(params, 1.0, comm.rank)


@each_rank_of(3)
def test_a_step_that_one_rank_leaves_out_is_an_error_on_all(comm: ac.Communicator) -> None:
    optimizer = ac.DistributedOptimizer(SGD(), comm=comm)

    def loop(params: Gradients) -> None:
        for step in range(STEPS):
            if (comm.rank, step) != (1, 1):
                params = optimizer.update(params, gradients(comm.rank, step))
            ac.mean_metrics(0.5, 1, comm=comm)

    # It waits for the others in the metrics, and they for it in the step.
    with pytest.raises(ac.DeadlockError):
        loop(zeros())


@each_rank_of(3)
def test_a_step_that_all_ranks_have_not_taken_is_none_to_any(comm: ac.Communicator) -> None:
    class Refusing:
        def update(self, params: float, grads: float) -> float:
            if params == 0:
                raise FloatingPointError("not finite")
            return params - grads

    optimizer = ac.DistributedOptimizer(Refusing(), comm=comm)
    with pytest.raises(FloatingPointError):
        optimizer.update(0.0, 1.0)
    result: float = optimizer.update(1.0, float(comm.rank))
    assert result == 0.0
