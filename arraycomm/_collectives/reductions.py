"""The collectives with arithmetic: see `operation.py`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from arraycomm._calls.arguments import check_root, check_rows, check_shares
from arraycomm._calls.custom_ops import Op
from arraycomm._calls.operation import NO_SHARE, ArrayOperation, Context, Share
from arraycomm._collectives import function_reductions
from arraycomm._dtypes import DType, check_op, check_reducible
from arraycomm._folds import fold
from arraycomm._protocol.agreement import Agreement
from arraycomm._reduce import algorithms
from arraycomm._reduce.blocks import bounds_of
from arraycomm._reduce.chunks import reserve
from arraycomm._transports.base import Bytes, Flat, Steps


class Reduction(ArrayOperation):
    """An operation that folds all ranks' elements in rank order."""

    header_independent = True
    # Whether chunks may be longer than usual, since they overlap.
    overlaps: ClassVar[bool] = False

    def __init__(self, context: Context, x: Any, op: str | Op, root: int | None = None) -> None:
        super().__init__(context, x, op)
        self.op, self.root = op, root
        self.signature = self.sign(_checked_name(self.source.dtype, op), root)

    def pack(self, room: int) -> Bytes | None:
        payload = super().pack(room)
        if payload is None and self.placement.host:
            reserve(self.group.transport, self.flat.nbytes if self.overlaps else 0)
        return payload

    def steps(self, agreement: Agreement) -> Steps:
        if isinstance(self.op, Op):
            yield from self.by_function(self.op, agreement)
        elif self.payload is None:
            yield from self.move(self.op)
        elif self.target is not None:
            fold(self.op, self.flat.dtype, self.folded_rows(agreement), self.target.flat)

    def move(self, op: str) -> Steps:
        """Reduce elements that have not come with the headers."""
        raise NotImplementedError

    def by_function(self, op: Op, agreement: Agreement) -> Steps:
        """Reduce by a function of the user's."""
        return function_reductions.reduce(self, op, agreement, self.into, self.root)

    def share(self) -> Share | None:
        if isinstance(self.op, Op):
            return None
        return NO_SHARE if self.target is None else self.share_of(self.op)

    def share_of(self, op: str) -> Share:
        """Return the share of a rank that gets a result."""
        return Share(range(self.group.size), 0, op)

    def folded_rows(self, agreement: Agreement) -> Flat:
        """Return what is folded of the elements that have come with the headers."""
        return self.rows(agreement)


class Allreduce(Reduction):
    """See `Communicator.allreduce`."""

    name, code = "allreduce", 2
    overlaps = True

    def __init__(self, context: Context, x: Any, op: str | Op, out: Any) -> None:
        super().__init__(context, x, op)
        self.target = self.make_target(self.source.shape, out)

    def move(self, op: str) -> Steps:
        return algorithms.allreduce(self.placement.link, self.flat, self.into, op)


class Reduce(Reduction):
    """See `Communicator.reduce`."""

    name, code = "reduce", 3
    overlaps = True

    def __init__(self, context: Context, x: Any, op: str | Op, root: int, out: Any) -> None:
        root = check_root(root, context.group.size)
        super().__init__(context, x, op, root)
        if self.group.rank == root:
            self.target = self.make_target(self.source.shape, out)

    def move(self, op: str) -> Steps:
        assert self.root is not None
        return algorithms.reduce(self.placement.link, self.flat, self.into, op, self.root)


class ReduceScatter(Reduction):
    """See `Communicator.reduce_scatter`."""

    name, code = "reduce_scatter", 25

    def __init__(self, context: Context, x: Any, op: str | Op, counts: Any, out: Any) -> None:
        super().__init__(context, x, op)
        size, rank = self.group.size, self.group.rank
        if counts is None:
            shape, lengths = check_rows(self.source, size), [1] * size
        else:
            tail, lengths = check_shares(self.source, counts, size)
            shape = (lengths[rank], *tail)
            self.signature = replace(self.signature, op=f"{self.signature.op}, counts={lengths}")
        self._bounds = bounds_of(lengths, math.prod(self.source.shape[1:]))
        self.target = self.make_target(shape, out)

    def move(self, op: str) -> Steps:
        link = self.placement.link
        return algorithms.reduce_scatter(link, self.flat, self._bounds, self.into, op)

    def by_function(self, op: Op, agreement: Agreement) -> Steps:
        return function_reductions.reduce_scatter(self, op, agreement, self._bounds, self.into)

    def share_of(self, op: str) -> Share:
        return Share(range(self.group.size), self.group.rank, op)

    def folded_rows(self, agreement: Agreement) -> Flat:
        start, end = self._bounds[self.group.rank : self.group.rank + 2]
        return self.rows(agreement)[:, start:end]


def _checked_name(dtype: DType, op: Any) -> str:
    """Raise unless the dtype has this reduction; return the name that the ranks compare."""
    if isinstance(op, Op):
        return op.name
    check_op(op)
    check_reducible(dtype, op)
    # Members of enums that are strings too have another `str`.
    return str.__str__(op)
