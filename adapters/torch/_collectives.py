"""Differentiable collectives of torch tensors.

Each is linear in the arrays of all ranks together, so its gradient is its transpose, which is a
collective too, and differentiable in the same way.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

import arraycomm as ac
from arraycomm._entries import can_be_hidden, entry, opaque
from arraycomm.adapters.torch._agreement import CallState, agree, raise_on_all

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """Have `torch.compile` call a function as it is, between two graphs."""
    if can_be_hidden():
        return opaque(function)
    # This imports torch's compiler, which takes as long as torch.
    eager: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return eager


def _is_linear(op: Any) -> bool:
    return isinstance(op, str) and op in ("sum", "mean")


@dataclass(frozen=True, eq=False)
class Collective:
    """A linear collective."""

    # That of the function that the user calls.
    name: str
    # Makes the call on a tensor without history, or on None.
    run: Callable[[ac.Communicator, Any], torch.Tensor]
    # Returns the collective that takes gradients of the results to those of the arguments.
    transpose: Callable[[], Collective]
    # Where the batch axis of torch.vmap goes in the argument, and where the result has it.
    batched_axis: int = 0
    result_axis: int = 0
    # Whether every rank passes a tensor.
    all_know_dtype: bool = True


def _allreduce(op: Any) -> Collective:
    return Collective("allreduce", lambda comm, x: comm.allreduce(x, op), lambda: _allreduce(op))


def gathering(*, mean: bool = False) -> Collective:
    """Return `allgather`; with `mean`, of the ranks' arrays divided by their number."""

    def run(comm: ac.Communicator, x: Any) -> torch.Tensor:
        rows: torch.Tensor = comm.allgather(x)
        return rows / comm.size if mean else rows

    return Collective(
        "allgather", run, lambda: _reduce_scatter("mean" if mean else "sum"), result_axis=1
    )


def _reduce_scatter(op: Any) -> Collective:
    return Collective(
        "reduce_scatter",
        lambda comm, x: comm.reduce_scatter(x, op),
        lambda: gathering(mean=op == "mean"),
        batched_axis=1,
    )


def _alltoall() -> Collective:
    return Collective(
        "alltoall", lambda comm, x: comm.alltoall(x), _alltoall, batched_axis=1, result_axis=1
    )


def _bcast(root: int, like: torch.Tensor | None = None) -> Collective:
    return Collective(
        "bcast",
        lambda comm, x: comm.bcast(x, root, like=like),
        lambda: _sum_on(root),
        all_know_dtype=False,
    )


def _sum_on(root: int) -> Collective:
    """Return the sum on `root`, and zeros on the other ranks."""

    def run(comm: ac.Communicator, x: Any) -> torch.Tensor:
        total: torch.Tensor | None = comm.reduce(x, "sum", root)
        return (
            torch.zeros_like(x, memory_format=torch.contiguous_format) if total is None else total
        )

    return Collective("bcast", run, lambda: _bcast(root))


# The recorded calls of a communicator are numbered, in the same order on every rank.
_numbers: Final[weakref.WeakKeyDictionary[ac.Communicator, itertools.count[int]]] = (
    weakref.WeakKeyDictionary()
)


class _Recorded(torch.autograd.Function):
    """A collective that torch records.

    `anchor` is a tensor that requires gradients, on ranks whose own tensor does not: so every rank
    takes part in the backward pass.
    """

    @staticmethod
    def forward(
        x: torch.Tensor | None,
        anchor: torch.Tensor | None,
        collective: Collective,
        comm: ac.Communicator,
        number: int,
    ) -> torch.Tensor:
        return collective.run(comm, None if x is None else x.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, _, ctx.collective, ctx.comm, ctx.number = inputs
        ctx.has_tensor = x is not None

    @staticmethod
    @entry
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = call(ctx.collective.transpose(), gradients[0], ctx.comm, ctx.number)
        return gradient if ctx.has_tensor else None, None, None, None, None

    @staticmethod
    @entry
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return call(ctx.collective, tangents[0], ctx.comm)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        x: torch.Tensor,
        anchor: torch.Tensor | None,
        collective: Collective,
        comm: ac.Communicator,
        number: int,
    ) -> tuple[torch.Tensor, int]:
        if x.ndim <= collective.batched_axis:
            message = (
                f"{collective.name}: x must have an axis of the ranks; got shape () under vmap"
            )
            raise_on_all(comm, ValueError(message))
        moved = x.movedim(in_dims[0], collective.batched_axis)
        return _recorded(moved, anchor, collective, comm, number), collective.result_axis


_recorded: Final[Callable[..., torch.Tensor]] = _Recorded.apply


def call(
    collective: Collective, x: torch.Tensor | None, comm: ac.Communicator, differentiates: int = -1
) -> torch.Tensor:
    """Make a call that torch records if it records the tensor of any rank."""
    state = CallState.of(x, differentiates)
    if differentiates < 0 and not _may_be_recorded(collective, x, state):
        return collective.run(comm, x)
    return record(collective, x, comm, agree(comm, collective.name, state))


def _may_be_recorded(collective: Collective, x: torch.Tensor | None, state: CallState) -> bool:
    """Return whether torch may record this call on any rank, if all ranks have the same modes."""
    without_gradients = (
        collective.all_know_dtype
        and x is not None
        and not (x.is_floating_point() or x.is_complex())
    )
    return state.recorded or (torch.is_grad_enabled() and not without_gradients)


def record(
    collective: Collective, x: torch.Tensor | None, comm: ac.Communicator, states: list[CallState]
) -> torch.Tensor:
    """Make a call whose ranks have agreed on these states."""
    if not any(state.recorded for state in states):
        return collective.run(comm, x)
    number = next(_numbers.setdefault(comm, itertools.count()))
    anchor = None
    if any(state.requires_grad for state in states) and not states[comm.rank].requires_grad:
        anchor = torch.zeros((), requires_grad=True)
    return _recorded(x, anchor, collective, comm, number)


def _checked(x: Any, operation: str, comm: ac.Communicator) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        message = f"{operation}: x must be a torch.Tensor; got {type(x).__name__}"
        raise_on_all(
            comm, TypeError(f"{message}. Use the communicator's {operation} for other arrays")
        )
    return x


def _call_with_op(
    collective: Collective, x: Any, op: Any, comm: ac.Communicator | None
) -> torch.Tensor:
    comm = comm or ac.world()
    x = _checked(x, collective.name, comm)
    if _is_linear(op):
        return call(collective, x, comm)
    state = CallState.of(x, differentiable=False)
    if _may_be_recorded(collective, x, state):
        agree(comm, collective.name, state)
    return collective.run(comm, x)


@outside_graphs
def allreduce(
    x: torch.Tensor, op: Any = "sum", *, comm: ac.Communicator | None = None
) -> torch.Tensor:
    """Reduce all ranks' tensors, differentiably; every rank gets the result.

    Parameters
    ----------
    x : Tensor, shape S
        This rank's tensor; shape and dtype are the same on every rank. It may require gradients on
        some ranks only.
    op : str or Op
        As for `Communicator.allreduce`. Only "sum" and "mean" have gradients.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    Tensor, shape S
        A fresh tensor with the same bits on every rank. It requires gradients on every rank if x
        does on any. The gradient of x is the `allreduce` of the result's gradients, with the same
        op.

    Raises
    ------
    TypeError
        The op has no gradient, and x requires gradients on some rank: raised on every rank.
    MismatchError, PeerError, CommTimeoutError
        As for `Communicator.allreduce`; also in backward passes, if ranks differentiate different
        calls.

    Notes
    -----
    The ranks agree in one small step before the call, and before its backward pass. There is no
    such step if x is of integers or bools, or under `torch.no_grad()`: grad mode is the same on
    every rank.
    """
    return _call_with_op(_allreduce(op), x, op, comm)


@outside_graphs
def allgather(x: torch.Tensor, *, comm: ac.Communicator | None = None) -> torch.Tensor:
    """Stack all ranks' tensors, differentiably; every rank gets the result.

    Parameters
    ----------
    x : Tensor, shape S
        This rank's tensor; shape and dtype are the same on every rank.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    Tensor, shape (size, *S)
        Row r is the tensor of rank r. The gradient of x is the `reduce_scatter` of the result's
        gradients, summed.

    Notes
    -----
    See `allreduce` for tensors that require gradients on some ranks only, for errors and for costs.
    """
    comm = comm or ac.world()
    return call(gathering(), _checked(x, "allgather", comm), comm)


@outside_graphs
def reduce_scatter(
    x: torch.Tensor, op: Any = "sum", *, comm: ac.Communicator | None = None
) -> torch.Tensor:
    """Reduce all ranks' tensors, differentiably; each rank gets its row of the result.

    Parameters
    ----------
    x : Tensor, shape (size, *S)
        This rank's tensor; shape and dtype are the same on every rank.
    op : str or Op
        As for `Communicator.allreduce`. Only "sum" and "mean" have gradients.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    Tensor, shape S
        Row r of what `allreduce` would give, on rank r. The gradient of x is the `allgather` of the
        result's gradients, divided by the number of ranks if the op is "mean".

    Notes
    -----
    See `allreduce` for tensors that require gradients on some ranks only, for errors and for costs.
    """
    return _call_with_op(_reduce_scatter(op), x, op, comm)


@outside_graphs
def alltoall(x: torch.Tensor, *, comm: ac.Communicator | None = None) -> torch.Tensor:
    """Send row r to rank r, and get a row from each, differentiably.

    Parameters
    ----------
    x : Tensor, shape (size, *S)
        This rank's rows; shape and dtype are the same on every rank.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    Tensor, shape (size, *S)
        Row r is what rank r had in the row of this rank. The gradient of x is the `alltoall` of the
        result's gradients.

    Notes
    -----
    See `allreduce` for tensors that require gradients on some ranks only, for errors and for costs.
    """
    comm = comm or ac.world()
    return call(_alltoall(), _checked(x, "alltoall", comm), comm)


@outside_graphs
def bcast(
    x: torch.Tensor | None = None,
    root: int = 0,
    *,
    like: torch.Tensor | None = None,
    comm: ac.Communicator | None = None,
) -> torch.Tensor:
    """Give every rank the tensor of `root`, differentiably.

    Parameters
    ----------
    x : Tensor, shape S, or None
        On `root` the tensor to send. The other ranks pass None, or a tensor of the same shape and
        dtype; under a transform of torch.func and in forward mode, every rank passes a tensor.
    root : int
        The rank that sends.
    like : Tensor, optional
        On ranks that pass no `x`: a tensor on the device wanted. By default the communicator's.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    Tensor, shape S
        A fresh tensor on every rank. The gradient of x is the sum of all ranks' gradients on
        `root`, and zeros on the other ranks.

    Notes
    -----
    See `allreduce` for tensors that require gradients on some ranks only, for errors and for costs.
    """
    comm = comm or ac.world()
    if x is not None:
        return call(_bcast(root), _checked(x, "bcast", comm), comm)
    like = torch.empty(0, device=comm.device) if like is None else like
    return call(_bcast(root, _checked(like, "bcast", comm)), None, comm)
