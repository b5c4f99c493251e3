"""Optimizers in programs: how a rank makes one and takes a step, and what it must get.

A step hands over the reduced gradients, so that it depends on no earlier one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np

import arraycomm as ac
from arraycomm import Communicator
from tests.faults.above import whole
from tests.faults.programs import Action, Call, Program
from tests.faults.values import ON_PURPOSE, OnPurposeError

_WITH_TORCH: Final = importlib.util.find_spec("torch") is not None


class Optimizer(Protocol):
    """An optimizer of one rank, distributed."""

    def step(self, gradients: dict[str, Any], *, fails: bool) -> dict[str, Any] | None:
        """Take a step; return the reduced gradients if it was the last before a reduction."""


def spare_torch(program: Program) -> None:
    """Take another optimizer in place of torch's, which takes processes seconds to load."""
    program.actions = [
        [_without_torch(action) for action in actions] for actions in program.actions
    ]


def _without_torch(action: Action) -> Action:
    if action.call is None:
        return action
    setting = action.call.setting.replace("torch", "numpy")
    return replace(action, call=replace(action.call, setting=setting))


def takes_torch(program: Program) -> bool:
    """Return whether an optimizer of the program is torch's."""
    calls = [action.call for actions in program.actions for action in actions]
    return _WITH_TORCH and any("torch" in call.setting for call in calls if call is not None)


def preload(program: Program) -> None:
    """Load what the program needs later, while no rank waits for this one and there is memory."""
    for name in dir(ac):
        getattr(ac, name)
    importlib.import_module("arraycomm.adapters.numpy")
    if takes_torch(program):
        import torch

        # The first step of the process loads more.
        torch.optim.SGD([torch.zeros(1)], lr=1.0).step()


def make(comm: Communicator, call: Call) -> Optimizer:
    """Make an optimizer by its settings; collective."""
    op, accumulate, framework = call.setting.split()
    options: dict[str, Any] = {"comm": comm, "op": op, "accumulate": int(accumulate)}
    if call.wrong == "no optimizer":
        ac.DistributedOptimizer(object(), **options)
    return (_Torch if _WITH_TORCH and framework == "torch" else _Plain)(options)


def update(optimizer: Optimizer, call: Call, rank: int) -> Any:
    """Take as many steps as are accumulated; return the reduced gradients."""
    accumulate = int(call.setting.split()[1])
    for step in range(accumulate):
        gradients = _gradients(call, rank, step)
        # The other ranks learn of what is wrong in the last of the steps.
        last = step + 1 == accumulate
        if call.wrong == "gradient" and last:
            gradients["w"] = object()
        fails = call.wrong == "optimizer" and last
        got = optimizer.step(gradients, fails=fails)
    assert got is not None
    return [got["w"], got["v"]]


def updated(calls: Sequence[Call], rank: int) -> Any:
    """Return the gradients that a rank gets."""
    w = [_mean_of_steps(call, r, "w") for r, call in enumerate(calls)]
    v = [_mean_of_steps(call, r, "v") for r, call in enumerate(calls)]
    return [_reduced(w, calls[rank]), _reduced(v, calls[rank])]


def _reduced(means: Sequence[Any], call: Call) -> Any:
    present = [mean for mean in means if mean is not None]
    if not present:
        return None
    divisor = len(means) if call.setting.startswith("mean") else 1
    return (sum(present) / divisor).astype(present[0].dtype)


def _gradients(call: Call, rank: int, step: int) -> dict[str, Any]:
    gradient = whole(call, rank, step)
    missing = (call.number + rank) % 2 == 0
    return {"w": gradient, "v": None if missing else np.asarray(gradient * 2)}


def _mean_of_steps(call: Call, rank: int, name: str) -> Any:
    accumulate = int(call.setting.split()[1])
    steps = [_gradients(call, rank, step)[name] for step in range(accumulate)]
    return None if steps[0] is None else (sum(steps) / accumulate).astype(steps[0].dtype)


class _Handing:
    """An optimizer for any array: hands over the gradients."""

    fails = False

    def update(self, params: Any, grads: Any) -> Any:
        if self.fails:
            raise OnPurposeError(ON_PURPOSE)
        return grads


class _Plain:
    def __init__(self, options: dict[str, Any]) -> None:
        self._optimizer = ac.DistributedOptimizer(_Handing(), **options)

    def step(self, gradients: dict[str, Any], *, fails: bool) -> dict[str, Any] | None:
        self._optimizer.fails = fails
        got: dict[str, Any] | None = self._optimizer.update(None, gradients)
        return got


class _Torch:
    """torch's SGD, with parameters that are zero before each step."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        self._torch = torch
        self._optimizer = ac.DistributedOptimizer(
            torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), **options
        )

    def step(self, gradients: dict[str, Any], *, fails: bool) -> dict[str, Any] | None:
        torch = self._torch
        parameters = {
            name: torch.zeros(gradients["w"].shape, dtype=getattr(torch, str(gradients["w"].dtype)))
            for name in gradients
        }
        for name, gradient in gradients.items():
            parameters[name].requires_grad_()
            parameters[name].grad = None if gradient is None else torch.from_numpy(gradient)
        self._optimizer.param_groups[0]["params"] = list(parameters.values())
        handle = self._optimizer.register_step_post_hook(_fail) if fails else None
        try:
            self._optimizer.step()
        finally:
            if handle is not None:
                handle.remove()
        return {
            name: None if p.grad is None else (0.0 - p.detach()).numpy()
            for name, p in parameters.items()
        }


def _fail(*_: Any) -> None:
    raise OnPurposeError(ON_PURPOSE)
