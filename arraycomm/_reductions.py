"""The collectives with arithmetic, as calls: see `_calls.py`.

A function here looks at its arguments, raises what is wrong with them, and returns a `Call`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from arraycomm import _algorithms
from arraycomm._calls import Call, Target, check_root, flatten, payload_of
from arraycomm._dtypes import DType, check_movable, check_op, check_reducible
from arraycomm._folds import fold
from arraycomm._header import Agreement, Signature, Steps
from arraycomm._views import view

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator


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
    rows = [agreement.payload(r, flat.nbytes).view(flat.dtype) for r in range(comm.size)]
    fold(op, flat.dtype, rows, target)
