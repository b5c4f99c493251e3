"""PyTorch: optimizers, differentiable collectives, batch norm and a data loader for several ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

import arraycomm as ac
from arraycomm.adapters._torch_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from arraycomm.adapters._torch_collectives import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    reduce_scatter,
)
from arraycomm.adapters._torch_data import DataLoader

__all__ = [
    "DataLoader",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "convert_sync_batchnorm",
    "reduce_scatter",
    "synchronize",
]

DistributedOptimizer = ac.DistributedOptimizer
synchronize = ac.synchronize

_distributed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def check(optimizer: Any) -> None:
    """Raise unless this is a torch optimizer that is not distributed already."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "DistributedOptimizer: optimizer must be a torch.optim.Optimizer; "
            f"got {type(optimizer).__name__}"
        )
    if optimizer in _distributed:
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")


def distribute(optimizer: torch.optim.Optimizer, gradients: Any) -> torch.optim.Optimizer:
    """Reduce gradients by a hook before each step."""
    held: list[tuple[torch.Tensor, Any]] = []
    following: list[bool] = []

    def reduce_gradients() -> None:
        parameters = [p for each in optimizer.param_groups for p in each["params"]]
        complete, reduced = gradients.add([p.grad for p in parameters])
        if not complete:
            # Torch's optimizers do not change a parameter without a gradient, nor its state.
            for parameter in parameters:
                held.append((parameter, parameter.grad))
                parameter.grad = None
            return
        for parameter, gradient in zip(parameters, reduced, strict=True):
            _set_gradient(parameter, gradient)

    def reduced_closure(closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            reduce_gradients()
            if loss is None:
                return None
            return gradients.reduce_loss(loss.detach() if isinstance(loss, torch.Tensor) else loss)

        evaluated: Callable[[], Any] = gradients.entry(evaluate)
        return evaluated

    def before_step(
        _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if following:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            reduce_gradients()
            return None
        if gradients.accumulate > 1:
            raise ValueError(
                "DistributedOptimizer: gradients are accumulated over "
                f"{gradients.accumulate} steps, which a closure, evaluated within one step, cannot "
                "be; call step() without one, or pass accumulate=1"
            )
        return args[:1], {**kwargs, "closure": reduced_closure(closure)}

    def after_step(*_: Any) -> None:
        while held:
            parameter, gradient = held.pop()
            parameter.grad = gradient

    def follow(reduced: Any) -> None:
        parameters = [p for each in optimizer.param_groups for p in each["params"]]
        for parameter, gradient in zip(parameters, reduced, strict=True):
            parameter.grad = None
            _set_gradient(parameter, gradient)
        following.append(True)
        try:
            optimizer.step()
        finally:
            following.clear()

    # A rank without data applies gradients through this; the hooks keep it alive.
    gradients.follow = follow
    vars(optimizer)["__reduce_ex__"] = lambda protocol: _reduced(optimizer, protocol, gradients)
    optimizer.register_step_pre_hook(gradients.entry(before_step))
    optimizer.register_step_post_hook(gradients.entry(after_step))
    _distributed.add(optimizer)
    return optimizer


def _reduced(optimizer: torch.optim.Optimizer, protocol: Any, gradients: Any) -> tuple[Any, ...]:
    """Return what `copy` makes a copy of: torch leaves out hooks. `gradients` refuse to be pickled."""
    reduced: tuple[Any, ...] = type(optimizer).__reduce_ex__(optimizer, protocol)  # type: ignore[assignment]
    return _copied, (gradients, *reduced[:3])


def _copied(
    gradients: Any, make: Callable[..., torch.optim.Optimizer], arguments: Any, state: Any
) -> torch.optim.Optimizer:
    """Return a copy of a distributed optimizer, which is distributed as well."""
    optimizer = make(*arguments)
    optimizer.__setstate__(state)
    return distribute(optimizer, gradients.copy())


def _set_gradient(parameter: torch.Tensor, gradient: Any) -> None:
    if gradient is None:
        return
    if not isinstance(gradient, torch.Tensor):
        # This rank had no gradient at all, so the result is NumPy's.
        gradient = ac.exchange(gradient, "torch")
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.device)
    else:
        parameter.grad.copy_(gradient)
