"""Torch's own optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.testing import run
from tests.adapters.gradients import STEPS, Gradients, gradients, reduced, zeros
from tests.adapters.optimizer_contract import (
    Array,
    Batch,
    Driver,
    OptimizerContract,
    batch,
    initial_parameters,
    loss_of,
    together,
)

torch = pytest.importorskip("torch")

Make = Callable[[list[Any]], Any]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    # With an epsilon so large that the size of the gradients matters, not their sign alone.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, eps=0.1, weight_decay=0.1),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4),
}


class TorchDriver(Driver):
    """Torch's optimizers, with gradients of backward passes."""

    def make(self, params: dict[str, Any], kind: str) -> None:
        tensors = {name: torch.from_numpy(array) for name, array in params.items()}
        self.model = torch.nn.ParameterDict(tensors)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.taken, self.accumulate = 0, 1

    def distribute(self, comm: ac.Communicator, options: dict[str, Any]) -> None:
        assert ac.DistributedOptimizer(self.optimizer, comm=comm, **options) is self.optimizer
        self.accumulate = options.get("accumulate", 1)

    def apply(self, grads: dict[str, Any]) -> None:
        for name, grad in grads.items():
            self.model[name].grad = None if grad is None else torch.from_numpy(grad.copy())
        self.optimizer.step()

    def learn(self, part: Batch, factor: float) -> None:
        self.optimizer.zero_grad()
        self.backward(part, factor)
        self.taken += 1
        if self.clip is not None and self.taken % self.accumulate == 0:
            assert torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip) > self.clip
        self.optimizer.step()

    def backward(self, part: Batch, factor: float) -> Any:
        tensors = Batch(*map(torch.from_numpy, part))
        loss = factor * loss_of(self.model, tensors, torch.tanh)
        loss.backward()
        return loss.detach()

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def parameters(self) -> dict[str, Array]:
        return {name: value.detach().numpy().copy() for name, value in self.model.items()}

    def state(self) -> Any:
        return copy.deepcopy([self.parameters(), self.optimizer.state_dict()])

    def resume(self, saved: Any, comm: ac.Communicator) -> None:
        if saved is not None:
            params, state = saved
            self.model.load_state_dict({n: torch.from_numpy(array) for n, array in params.items()})
            self.optimizer.load_state_dict(state)
        self.synchronize(0, comm)

    def synchronize(self, root: int, comm: ac.Communicator) -> None:
        ac.synchronize([self.model, self.optimizer], root=root, comm=comm)

    def finish(self, joined: ac.Join) -> None:
        """Do nothing: parameters and state are the same on all ranks."""


class TestContract(OptimizerContract):
    driver = TorchDriver

    def test_closures_are_evaluated_as_by_one_process(
        self, on_ranks, few: int, options: dict[str, Any]
    ) -> None:
        def steps(mine: TorchDriver, parts: list[Batch]) -> tuple[list[Any], list[float]]:
            seen, losses = [], []
            for part in parts:

                def closure(part: Batch = part) -> Any:
                    mine.optimizer.zero_grad()
                    return mine.backward(part, 1 / len(part.y))

                losses.append(float(mine.optimizer.step(closure)))
                seen.append(mine.parameters())
            return seen, losses

        def train(comm: ac.Communicator) -> tuple[list[Any], list[float]]:
            mine = TorchDriver(initial_parameters(0), "lbfgs")
            mine.distribute(comm, options)
            return steps(mine, [batch(comm.rank, step) for step in range(STEPS)])

        one = TorchDriver(initial_parameters(0), "lbfgs")
        parts = [together([batch(r, step) for r in range(few)]) for step in range(STEPS)]
        want, losses = steps(one, parts)
        results = on_ranks(few, train)
        self._assert_trained([seen for seen, _ in results], [seen for seen, _ in results], want)
        assert all(got == pytest.approx(losses, rel=1e-12) for _, got in results)


def sgd(parameters: list[Any]) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


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


def test_a_rank_without_any_gradient_steps_with_the_others() -> None:
    def step(comm: ac.Communicator) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        optimizer = ac.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), comm=comm, op="sum")
        if comm.rank == 1:
            weight.grad = torch.full((2,), 3.0, dtype=torch.bfloat16)
        optimizer.step()
        return weight.detach().tolist()

    assert run(3, step) == [[-3.0, -3.0]] * 3
