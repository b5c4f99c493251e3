"""The collectives with arithmetic, as calls: see `_calls.py`.

A function here looks at its arguments, raises what is wrong with them, and returns a `Call`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._collectives import algorithms
from arraycomm._collectives.custom_ops import Folding, Op, my_rows, rows_on
from arraycomm._collectives.operation import (
    Call,
    bounds_of,
    check_root,
    check_rows,
    flatten,
    payload_of,
)
from arraycomm._dtypes import DType, check_movable, check_op, check_reducible
from arraycomm._folds import fold
from arraycomm._protocol.header import Agreement, Signature, Steps

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator

Array = np.ndarray[Any, Any]


def allreduce(comm: Communicator, x: Any, op: str | Op, out: Any) -> Call:
    """See `Communicator.allreduce`."""
    placement = comm._placement
    source = placement.view(x, "allreduce")
    name = _check_op(source.dtype, op, "allreduce")
    flat, copies = flatten(source)
    target = placement.target(source, source.shape, source.dtype, out, "allreduce", flat)

    def finish(agreement: Agreement) -> Steps:
        if isinstance(op, Op):
            yield from _reduce_by(comm, op, source, flat, target.flat, None, agreement, inline)
        elif inline:
            _fold_inline(comm, agreement, flat, op, target.flat)
        else:
            yield from algorithms.allreduce(placement.link, flat, target.flat, op)
        return target.deliver()

    inline = placement.inline(flat)
    return Call(
        Signature("allreduce", name, None, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + target.copies,
        blind=True,
        placement=placement,
    )


def reduce(comm: Communicator, x: Any, op: str | Op, root: int, out: Any) -> Call:
    """See `Communicator.reduce`."""
    root = check_root(comm, root, "reduce")
    placement = comm._placement
    source = placement.view(x, "reduce")
    name = _check_op(source.dtype, op, "reduce")
    flat, copies = flatten(source)
    target = None
    if comm.rank == root:
        target = placement.target(source, source.shape, source.dtype, out, "reduce", flat)

    def finish(agreement: Agreement) -> Steps:
        into = None if target is None else target.flat
        if isinstance(op, Op):
            yield from _reduce_by(comm, op, source, flat, into, root, agreement, inline)
        elif not inline:
            yield from algorithms.reduce(placement.link, flat, into, op, root)
        elif into is not None:
            _fold_inline(comm, agreement, flat, op, into)
        return None if target is None else target.deliver()

    inline = placement.inline(flat)
    return Call(
        Signature("reduce", name, root, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + (target.copies if target else 0),
        blind=True,
        placement=placement,
    )


def reduce_scatter(comm: Communicator, x: Any, op: str | Op, out: Any) -> Call:
    """See `Communicator.reduce_scatter`."""
    placement = comm._placement
    source = placement.view(x, "reduce_scatter")
    name = _check_op(source.dtype, op, "reduce_scatter")
    shape = check_rows(source, comm.size, "reduce_scatter")
    flat, copies = flatten(source)
    target = placement.target(source, shape, source.dtype, out, "reduce_scatter", flat)
    count = target.flat.size

    def finish(agreement: Agreement) -> Steps:
        if isinstance(op, Op):
            yield from _reduce_scatter_by(comm, op, source, flat, target.flat, agreement, inline)
        elif not inline:
            yield from algorithms.reduce_scatter(placement.link, flat, target.flat, op)
        elif count:
            mine = slice(comm.rank * count, (comm.rank + 1) * count)
            rows = [row[mine] for row in _rows_inline(comm, agreement, flat)]
            fold(op, flat.dtype, rows, target.flat)
        return target.deliver()

    inline = placement.inline(flat)
    return Call(
        Signature("reduce_scatter", name, None, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + target.copies,
        blind=True,
        placement=placement,
    )


def scan(comm: Communicator, x: Any, op: str | Op, out: Any) -> Call:
    """See `Communicator.scan`."""
    return _scan(comm, x, op, out, "scan", comm.rank + 1)


def exscan(comm: Communicator, x: Any, op: str | Op, out: Any) -> Call:
    """See `Communicator.exscan`."""
    return _scan(comm, x, op, out, "exscan", comm.rank)


def _scan(comm: Communicator, x: Any, op: str | Op, out: Any, operation: str, count: int) -> Call:
    """Fold what the first `count` ranks hold; with none of them there is no result."""
    placement = comm._placement
    source = placement.view(x, operation)
    name = _check_op(source.dtype, op, operation)
    flat, copies = flatten(source)
    target = None
    if count:
        target = placement.target(source, source.shape, source.dtype, out, operation, flat)

    def finish(agreement: Agreement) -> Steps:
        into = None if target is None else target.flat
        inclusive = operation == "scan"
        if isinstance(op, Op):
            yield from _scan_by(comm, op, source, flat, into, inclusive, agreement, inline)
        elif not inline:
            yield from algorithms.scan(placement.link, flat, into, op, inclusive)
        elif into is not None:
            fold(op, flat.dtype, _rows_inline(comm, agreement, flat)[:count], into)
        return None if target is None else target.deliver()

    inline = placement.inline(flat)
    return Call(
        Signature(operation, name, None, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + (target.copies if target else 0),
        blind=True,
        placement=placement,
    )


def _rows_inline(comm: Communicator, agreement: Agreement, flat: Array) -> list[Array]:
    """What came with the headers, as each rank's elements."""
    return [agreement.payload(r, flat.nbytes).view(flat.dtype) for r in range(comm.size)]


def _check_op(dtype: DType, op: Any, operation: str) -> str:
    """Raise unless the dtype has this reduction; return the name that the ranks compare."""
    check_movable(dtype, operation)
    if isinstance(op, Op):
        return op.name
    check_op(op, operation)
    check_reducible(dtype, op, operation)
    return str(op)


def _reduce_by(
    comm: Communicator,
    op: Op,
    source: BufferView,
    flat: Array,
    target: Array | None,
    root: int | None,
    agreement: Agreement,
    inline: bool,
) -> Steps:
    """Reduce by a function: on one rank, or slice by slice where that is allowed."""
    folding = Folding(comm, op, source, "allreduce" if root is None else "reduce")
    if op.elementwise and not inline:
        bounds = [flat.size * rank // comm.size for rank in range(comm.size + 1)]
        lengths = [end - start for start, end in pairwise(bounds)]
        rows = yield from my_rows(comm, flat, bounds, lengths)
        part = np.empty(lengths[comm.rank], flat.dtype)
        yield from folding.together(lambda: folding.fold(rows, part.shape, part))
        if root is not None:
            yield from algorithms.gatherv(comm._link, part, target, bounds, root)
        elif target is not None:
            target[bounds[comm.rank] : bounds[comm.rank + 1]] = part
            yield from algorithms.allgatherv(comm._link, target, bounds)
        return
    rows = yield from rows_on(comm, agreement, flat, root or 0, inline=inline)

    def attempt() -> None:
        assert target is not None
        folding.fold(rows, source.shape, target)

    yield from folding.together(None if rows is None else attempt)
    if root is None and target is not None:
        yield from algorithms.bcast(comm._link, target, 0)


def _reduce_scatter_by(
    comm: Communicator,
    op: Op,
    source: BufferView,
    flat: Array,
    target: Array,
    agreement: Agreement,
    inline: bool,
) -> Steps:
    """Reduce by a function: each rank its row where that is allowed, else all of them on rank 0."""
    folding = Folding(comm, op, source, "reduce_scatter")
    lengths = [target.size] * comm.size
    bounds = bounds_of(lengths)
    if op.elementwise:
        rows = yield from my_rows(comm, flat, bounds, lengths)
        yield from folding.together(lambda: folding.fold(rows, target.shape, target))
        return
    rows = yield from rows_on(comm, agreement, flat, 0, inline=inline)
    whole = None if rows is None else np.empty(flat.size, flat.dtype)

    def attempt() -> None:
        assert whole is not None
        folding.fold(rows, source.shape, whole)

    yield from folding.together(None if rows is None else attempt)
    yield from algorithms.scatterv(comm._link, whole, target, bounds, 0)


def _scan_by(
    comm: Communicator,
    op: Op,
    source: BufferView,
    flat: Array,
    target: Array | None,
    inclusive: bool,
    agreement: Agreement,
    inline: bool,
) -> Steps:
    """Fold all prefixes by a function, on rank 0, which then sends each rank its own."""
    folding = Folding(comm, op, source, "scan" if inclusive else "exscan")
    rows = yield from rows_on(comm, agreement, flat, 0, inline=inline)
    made = None if rows is None else np.empty((comm.size, flat.size), flat.dtype)

    def attempt() -> None:
        assert made is not None
        for place, prefix in enumerate(folding.prefixes(rows, source.shape)):
            made[place] = prefix

    yield from folding.together(None if made is None else attempt)
    if made is not None and not inclusive:
        made = np.roll(made, 1, axis=0)
    mine = np.empty(flat.size, flat.dtype)
    bounds = bounds_of([flat.size] * comm.size)
    sent = None if made is None else made.reshape(-1)
    yield from algorithms.scatterv(comm._link, sent, mine, bounds, 0)
    if target is not None:
        target[...] = mine


def _fold_inline(
    comm: Communicator,
    agreement: Agreement,
    flat: np.ndarray[Any, Any],
    op: str,
    target: np.ndarray[Any, Any],
) -> None:
    fold(op, flat.dtype, _rows_inline(comm, agreement, flat), target)
