"""PyTorch: optimizers that reduce gradients over all ranks before each step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

import arraycomm as ac

__all__ = ["DistributedOptimizer", "synchronize"]

synchronize = ac.synchronize

_distributed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    *,
    comm: ac.Communicator | None = None,
    op: str = "mean",
    bucket_bytes: int = 25 << 20,
) -> torch.optim.Optimizer:
    """Make a torch optimizer reduce the gradients over all ranks before each step.

    The optimizer itself is changed (by a hook before its steps) and returned, so that learning-rate
    schedulers, state dicts and everything else that holds it keep working.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any; with a closure, each evaluation's gradients and loss are reduced.
    comm, op, bucket_bytes
        As for `arraycomm.DistributedOptimizer`.

    Raises
    ------
    ValueError
        The optimizer is distributed already.
    """
    if optimizer in _distributed:
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")
    group = comm or ac.world()

    def reduce_gradients() -> None:
        parameters = [p for each in optimizer.param_groups for p in each["params"]]
        reduced = ac.allreduce_gradients(
            [p.grad for p in parameters], op, bucket_bytes=bucket_bytes, comm=group
        )
        for parameter, gradient in zip(parameters, reduced, strict=True):
            _set_gradient(parameter, gradient)

    def reduced_closure(closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            with torch.enable_grad():
                loss = closure()
            reduce_gradients()
            if loss is None:
                return None
            return group.allreduce(loss.detach() if isinstance(loss, torch.Tensor) else loss, op)

        return evaluate

    def before_step(
        _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            reduce_gradients()
            return None
        return args[:1], {**kwargs, "closure": reduced_closure(closure)}

    optimizer.register_step_pre_hook(before_step)
    _distributed.add(optimizer)
    return optimizer


def _set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        return
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.device)
    else:
        parameter.grad.copy_(gradient)
