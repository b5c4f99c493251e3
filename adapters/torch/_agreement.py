"""What ranks tell one another before a differentiable call, so that their backward passes pair up.

A backward pass of one rank meets those of the others. So before a call the ranks agree whether any
of them differentiates it, and before its backward pass that all differentiate the same call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd import forward_ad

import arraycomm as ac
from arraycomm._callsite import call_site
from arraycomm._protocol.mismatch import by_ranks


class CallState(NamedTuple):
    """What one rank shows of its call; what is true or false as 1 or 0."""

    # The number of the call whose backward pass this is; -1 for any other call.
    differentiates: int
    # Whether reverse mode records the tensor, and whether forward mode follows it.
    requires_grad: int
    has_tangent: int
    # How many transforms of torch.func the tensor is in.
    transforms: int
    # Whether the operation has a gradient.
    differentiable: int = 1
    # The number of elements of a channel, for batch norm.
    elements: int = 0

    @classmethod
    def of(
        cls,
        x: torch.Tensor | None,
        differentiates: int = -1,
        *,
        differentiable: bool = True,
        elements: int = 0,
    ) -> CallState:
        """Return the state of a call with this tensor."""
        if x is None:
            return cls(differentiates, False, False, 0, differentiable, elements)
        transforms = _transforms_of(x)
        return cls(
            differentiates,
            x.requires_grad and torch.is_grad_enabled(),
            not transforms and _has_tangent(x),
            transforms,
            differentiable,
            elements,
        )

    @property
    def recorded(self) -> bool:
        """Whether torch records what becomes of the tensor, in any of its modes."""
        return bool(self.requires_grad or self.has_tangent or self.transforms)


def _has_tangent(x: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]


def _transforms_of(x: torch.Tensor) -> int:
    # Torch 2.4 has no public name for these.
    depth = 0
    while is_functorch_wrapped_tensor(x):
        depth, x = depth + 1, get_unwrapped(x)
    return depth


def agree(comm: ac.Communicator, operation: str, own: CallState) -> list[CallState]:
    """Return the states of all ranks; raise the same error on every rank if they do not fit."""
    rows = comm.allgather(np.array(own, np.int64))
    states = [CallState(*row) for row in rows.tolist()]
    _check_same_call(comm, operation, states)
    _check_differentiable(operation, states)
    _check_same_transforms(operation, states)
    return states


def raise_on_all(comm: ac.Communicator, error: Exception) -> NoReturn:
    """Raise an argument error of this rank; the others raise `PeerError` in their call."""
    with ac.raise_together(comm):
        raise error
    raise error


def _check_same_call(comm: ac.Communicator, operation: str, states: list[CallState]) -> None:
    calls = [state.differentiates for state in states]
    if len(set(calls)) == 1:
        return
    # Every rank knows by now that the calls differ, and takes part in this.
    lines = comm.allgather_object(call_site())
    places = zip(calls, lines, strict=True)
    shown = by_ranks([f"{_backward_of(number)} at {line}" for number, line in places])
    if min(calls) < 0:
        cause = (
            "Some ranks make a forward call more than others: model.eval() may be missing where "
            "only some ranks evaluate a model. Or the loss of some ranks does not depend on the "
            "result y of a call: add 0 * y.sum() to it"
        )
    else:
        cause = "The loss of every rank must depend on the result of every call, in the same order"
    raise ac.MismatchError(
        f"{operation}: ranks must make the same calls, and differentiate the same calls, in the "
        f"same order; got {shown}. {cause}"
    )


def _backward_of(number: int) -> str:
    return "a forward call" if number < 0 else f"the backward pass of differentiable call {number}"


def _check_differentiable(operation: str, states: list[CallState]) -> None:
    recorded = _ranks(states, lambda state: state.recorded)
    if recorded and not all(state.differentiable for state in states):
        raise TypeError(
            f'{operation}: op must be "sum" or "mean" if x is differentiated or transformed, since '
            f"no other op has a gradient here; x is on ranks {recorded}. Pass x.detach()"
        )


def _check_same_transforms(operation: str, states: list[CallState]) -> None:
    transforms = [state.transforms for state in states]
    if any(transforms) and len({(state.transforms, state.requires_grad) for state in states}) > 1:
        raise ac.MismatchError(
            f"{operation}: x must be in the same transforms of torch.func on every rank; it is in "
            f"{transforms} of them on the ranks, and requires gradients on ranks "
            f"{_ranks(states, lambda state: state.requires_grad > 0)}. Compute x from the "
            "transformed arguments on every rank"
        )
    dual = _ranks(states, lambda state: state.has_tangent > 0)
    if dual and len(dual) < len(states):
        raise ac.MismatchError(
            f"{operation}: in forward mode, x must have a tangent on every rank or on none; it has "
            f"one on ranks {dual} of {len(states)}. Pass torch.autograd.forward_ad.make_dual(x, "
            "torch.zeros_like(x)) on the others"
        )


def _ranks(states: list[CallState], holds: Callable[[CallState], bool]) -> list[int]:
    return [rank for rank, state in enumerate(states) if holds(state)]
