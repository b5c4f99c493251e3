"""The collectives with arithmetic, as calls: see `_calls.py`.

A function here looks at its arguments, raises what is wrong with them, and returns a `Call`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from arraycomm import _algorithms
from arraycomm._calls import Call, Target, check_root, check_rows, flatten, payload_of
from arraycomm._dtypes import DType, check_movable, check_op, check_reducible
from arraycomm._folds import fold
from arraycomm._header import Agreement, Signature, Steps
from arraycomm._views import view

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator

Array = np.ndarray[Any, Any]


def allreduce(comm: Communicator, x: Any, op: str, out: Any) -> Call:
    """See `Communicator.allreduce`."""
    source = view(x, "allreduce")
    _check_op(source.dtype, op, "allreduce")
    flat, copies = flatten(source)
    target = Target(source, source.shape, source.dtype, out, "allreduce", flat)

    def finish(agreement: Agreement) -> Steps:
        if inline:
            _fold_inline(comm, agreement, flat, op, target.flat)
        else:
            yield from _algorithms.allreduce(comm._link, flat, target.flat, op, comm._scratch)
        return target.deliver()

    inline = flat.nbytes <= comm._inline
    return Call(
        Signature("allreduce", op, None, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + target.copies,
        blind=True,
    )


def reduce(comm: Communicator, x: Any, op: str, root: int, out: Any) -> Call:
    """See `Communicator.reduce`."""
    root = check_root(comm, root, "reduce")
    source = view(x, "reduce")
    _check_op(source.dtype, op, "reduce")
    flat, copies = flatten(source)
    target = None
    if comm.rank == root:
        target = Target(source, source.shape, source.dtype, out, "reduce", flat)

    def finish(agreement: Agreement) -> Steps:
        into = None if target is None else target.flat
        if not inline:
            yield from _algorithms.reduce(comm._link, flat, into, op, root, comm._scratch)
        elif into is not None:
            _fold_inline(comm, agreement, flat, op, into)
        return None if target is None else target.deliver()

    inline = flat.nbytes <= comm._inline
    return Call(
        Signature("reduce", op, root, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + (target.copies if target else 0),
        blind=True,
    )


def reduce_scatter(comm: Communicator, x: Any, op: str, out: Any) -> Call:
    """See `Communicator.reduce_scatter`."""
    source = view(x, "reduce_scatter")
    _check_op(source.dtype, op, "reduce_scatter")
    shape = check_rows(source, comm.size, "reduce_scatter")
    flat, copies = flatten(source)
    target = Target(source, shape, source.dtype, out, "reduce_scatter", flat)
    count = target.flat.size

    def finish(agreement: Agreement) -> Steps:
        link = comm._link
        if not inline:
            yield from _algorithms.reduce_scatter(link, flat, target.flat, op, comm._scratch)
        elif count:
            mine = slice(comm.rank * count, (comm.rank + 1) * count)
            rows = [row[mine] for row in _rows_inline(comm, agreement, flat)]
            fold(op, flat.dtype, rows, target.flat)
        return target.deliver()

    inline = flat.nbytes <= comm._inline
    return Call(
        Signature("reduce_scatter", op, None, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + target.copies,
        blind=True,
    )


def scan(comm: Communicator, x: Any, op: str, out: Any) -> Call:
    """See `Communicator.scan`."""
    return _scan(comm, x, op, out, "scan", comm.rank + 1)


def exscan(comm: Communicator, x: Any, op: str, out: Any) -> Call:
    """See `Communicator.exscan`."""
    return _scan(comm, x, op, out, "exscan", comm.rank)


def _scan(comm: Communicator, x: Any, op: str, out: Any, operation: str, count: int) -> Call:
    """Fold what the first `count` ranks hold; with none of them there is no result."""
    source = view(x, operation)
    _check_op(source.dtype, op, operation)
    flat, copies = flatten(source)
    target = None
    if count:
        target = Target(source, source.shape, source.dtype, out, operation, flat)

    def finish(agreement: Agreement) -> Steps:
        into = None if target is None else target.flat
        if not inline:
            link, inclusive = comm._link, operation == "scan"
            yield from _algorithms.scan(link, flat, into, op, comm._scratch, inclusive)
        elif into is not None:
            fold(op, flat.dtype, _rows_inline(comm, agreement, flat)[:count], into)
        return None if target is None else target.deliver()

    inline = flat.nbytes <= comm._inline
    return Call(
        Signature(operation, op, None, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + (target.copies if target else 0),
        blind=True,
    )


def _rows_inline(comm: Communicator, agreement: Agreement, flat: Array) -> list[Array]:
    """What came with the headers, as each rank's elements."""
    return [agreement.payload(r, flat.nbytes).view(flat.dtype) for r in range(comm.size)]


def _check_op(dtype: DType, op: Any, operation: str) -> None:
    check_op(op, operation)
    check_movable(dtype, operation)
    check_reducible(dtype, op, operation)


def _fold_inline(
    comm: Communicator,
    agreement: Agreement,
    flat: np.ndarray[Any, Any],
    op: str,
    target: np.ndarray[Any, Any],
) -> None:
    fold(op, flat.dtype, _rows_inline(comm, agreement, flat), target)
