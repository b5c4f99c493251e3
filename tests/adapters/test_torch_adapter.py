"""Torch's own optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

import arraycomm as ac
from arraycomm.testing import run
from tests.adapters.gradients import STEPS, gradients, reduced
from tests.adapters.optimizer_contract import (
    OPTIONS,
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

OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
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

    def test_closures_are_evaluated_as_by_one_process(self, on_ranks, few: int) -> None:
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
            mine.distribute(comm, OPTIONS)
            return steps(mine, [batch(comm.rank, step) for step in range(STEPS)])

        one = TorchDriver(initial_parameters(0), "lbfgs")
        parts = [together([batch(r, step) for r in range(few)]) for step in range(STEPS)]
        want, losses = steps(one, parts)
        results = on_ranks(few, train)
        self._assert_trained([seen for seen, _ in results], [seen for seen, _ in results], want)
        assert all(got == pytest.approx(losses, rel=1e-12) for _, got in results)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_made_before_or_after_wrapping_works(when: str) -> None:
    def train(comm: ac.Communicator | None, size: int = 2) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        schedulers = []
        for moment in ("before", "after"):
            if moment == "after" and comm is not None:
                optimizer = ac.DistributedOptimizer(optimizer, comm=comm)
            if moment == when:
                schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5))
        for step in range(STEPS):
            mine = reduced(size, step, "mean") if comm is None else gradients(comm.rank, step)
            weight.grad = torch.from_numpy(mine["a"].copy())
            optimizer.step()
            schedulers[0].step()
        return weight.tolist()

    assert run(2, train) == [train(None)] * 2
