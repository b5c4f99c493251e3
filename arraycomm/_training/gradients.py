"""Gradients of one distributed optimizer: added up over steps, then reduced over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import view
from arraycomm._collectives.operation import Call
from arraycomm._communicator import Communicator
from arraycomm._dtypes import DType, Kind, check_reducible, kind_of
from arraycomm._trees.pytrees import flatten
from arraycomm._trees.reduce import gradients_call

_NAME = "allreduce_gradients"


class Gradients:
    """How the gradients of an optimizer are reduced, and those that wait for others to be added.

    Attributes
    ----------
    comm : Communicator
        The optimizer's own.
    op : str
        "mean" or "sum" over ranks.
    accumulate : int
        Steps whose mean is reduced.
    options : dict
        What `allreduce_gradients` takes beside these.
    """

    def __init__(
        self,
        comm: Communicator,
        op: str,
        bucket_bytes: int,
        accumulate: int,
        compression: str | None,
    ) -> None:
        self.comm, self.op, self.accumulate = comm, op, accumulate
        # The same on every rank, as optimizers are made by all together.
        self.number = 0
        if (group := comm._joins_with) is not None:
            self.number = group._made_optimizers
            group._made_optimizers += 1
            group._optimizers[self.number] = self
        self.options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "compression": compression}
        # Applies a step's gradients on a rank without data, where the adapter can; see `join`.
        self.follow: Callable[[Any], None] = lambda gradients: None
        self._steps = 0
        self._sums: list[Sum | None] = []

    def add(self, tree: Any) -> tuple[bool, Any]:
        """Add the gradients of a step; return whether all are there, and then the reduced ones.

        Collective where they are; a local matter where more are to come.
        """
        group = self.comm._joins_with
        if group is not None and group._join is not None:
            reduced = group._call(_NAME, self._prepare_joined, tree)
            return bool(group._join.total), reduced
        if self._steps + 1 < self.accumulate:
            self._sums = self._added(tree)
            self._steps += 1
            return False, None
        # Inside the call, so that what is wrong with this rank's gradients reaches the others.
        reduced = self.comm._call(_NAME, self._prepare, tree)
        # Not before: where the call failed, the ranks can make it again.
        self._steps, self._sums = 0, []
        return True, reduced

    def reduce_loss(self, loss: Any) -> Any:
        """Reduce a loss as the gradients are."""
        return self.comm.allreduce(loss, self.op)

    def _prepare_joined(self, comm: Communicator, tree: Any) -> Call:
        if self.accumulate > 1:
            raise ValueError(
                f"{_NAME}: inside join gradients cannot be accumulated, since ranks that have no "
                f"more steps would keep some back; got an optimizer with accumulate={self.accumulate}"
            )
        note = f", optimizer {self.number}"
        return gradients_call(comm, tree, self.op, "zeros", **self.options, note=note)

    def _prepare(self, comm: Communicator, tree: Any) -> Call:
        means = tree if self.accumulate == 1 else self._means(tree)
        return gradients_call(comm, means, self.op, "zeros", **self.options)

    def _added(self, tree: Any) -> list[Sum | None]:
        """Return this rank's sums with another step's gradients, and leave the old ones alone."""
        flat = flatten(tree)
        sums = self._sums or [None] * len(flat.leaves)
        if len(sums) != len(flat.leaves):
            raise ValueError(
                f"{_NAME}: gradients that are accumulated must have the same structure in every "
                f"step; got {len(flat.leaves)} leaves after {len(sums)}"
            )
        return [
            total if leaf is None else _plus(total, leaf, path)
            for total, leaf, path in zip(sums, flat.leaves, flat.paths, strict=True)
        ]

    def _means(self, tree: Any) -> Any:
        sums = self._added(tree)
        return flatten(tree).rebuild(
            [None if total is None else total.mean(self.accumulate) for total in sums]
        )


class Sum:
    """The gradients of one leaf, added up with the precision in which ranks' are."""

    def __init__(self, array: np.ndarray[Any, Any], like: BufferView) -> None:
        self.array, self.like = array, like

    def mean(self, steps: int) -> Any:
        """Return the mean over so many steps, as an array like the gradients."""
        with np.errstate(all="ignore"):
            mean = np.asarray(self.array / self.array.dtype.type(steps))
            return to_framework(mean.astype(self.like.dtype), self.like)


def _plus(total: Sum | None, leaf: Any, path: str) -> Sum:
    like = view(leaf, f"{_NAME}: {path}")
    check_reducible(like.dtype, "mean", f"{_NAME}: {path}")
    if total is None:
        # A copy, since the caller's memory is the next step's as well.
        return Sum(like.array.astype(_wide(like.dtype)), like)
    if (like.shape, like.dtype) != (total.like.shape, total.like.dtype):
        raise ValueError(
            f"{_NAME}: {path} must have the same shape and dtype in every step that is accumulated; "
            f"got {like.dtype} {like.shape} after {total.like.dtype} {total.like.shape}"
        )
    with np.errstate(all="ignore"):
        return Sum(np.asarray(total.array + like.array.astype(total.array.dtype)), like)


def _wide(dtype: DType) -> DType:
    return np.dtype(np.float32) if kind_of(dtype) is Kind.NARROW else dtype
