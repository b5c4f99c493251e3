"""Torch objects whose state is sent whole: optimizers, schedulers, scalers, extra state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from arraycomm._protocol.header import LeafSpec
from arraycomm._trees.nodes import ExtraState, is_torch


class State(NamedTuple):
    """A state that all ranks take from one.

    `described` is what has to be the same on all ranks for that; `load` puts another rank's value
    in the place of `value`.
    """

    described: tuple[LeafSpec, ...]
    value: Any
    load: Callable[[Any], Any]


def state_of(leaf: Any, path: str) -> State | None:
    """Return the state of a leaf, or None if it is none of the objects that have one."""
    if isinstance(leaf, ExtraState):
        described = LeafSpec(path, f"extra state of {type(leaf.module).__name__}")
        return State((described,), leaf.module.get_extra_state(), leaf.module.set_extra_state)
    if is_torch(leaf, "optim", "Optimizer"):
        described = LeafSpec(path, type(leaf).__name__)
        parameters = _described_parameters(leaf, path)
        return State((described, *parameters), leaf.state_dict(), partial(_load_optimizer, leaf))
    if is_torch(leaf, "optim", "lr_scheduler", "LRScheduler"):
        described = LeafSpec(path, _described_scheduler(leaf))
        return State((described,), leaf.state_dict(), leaf.load_state_dict)
    if is_torch(leaf, "amp", "GradScaler"):
        # One that is disabled has no state.
        described = LeafSpec(path, "GradScaler" if leaf.is_enabled() else "disabled GradScaler")
        return State((described,), leaf.state_dict(), leaf.load_state_dict)
    return None


def _described_parameters(optimizer: Any, path: str) -> Iterator[LeafSpec]:
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            where = f"{path}.param_groups[{number}]['params'][{position}]"
            yield LeafSpec(where, "parameter", tuple(parameter.shape))


def _described_scheduler(scheduler: Any) -> str:
    """Return the type of a scheduler, with those of the schedulers that it is made of."""
    inner = ", ".join(map(_described_scheduler, getattr(scheduler, "_schedulers", ())))
    return f"{type(scheduler).__name__}({inner})" if inner else type(scheduler).__name__


def _load_optimizer(optimizer: Any, state: Any) -> None:
    """Load a state with the dtypes that it has; torch gives it those of the parameters."""
    optimizer.load_state_dict(state)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in enumerate(parameters):
        own = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(number, {}).items():
            loaded = own.get(name)
            if is_torch(loaded, "Tensor") and is_torch(value, "Tensor"):
                own[name] = loaded if loaded.dtype == value.dtype else value.to(loaded.device)
