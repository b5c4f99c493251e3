"""The collectives that move arrays and leave them as they are, as calls: see `_calls.py`.

A function here looks at its arguments, raises what is wrong with them, and returns a `Call`.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

import numpy as np

from arraycomm import _algorithms
from arraycomm._buffers import BufferView
from arraycomm._calls import Call, Target, check_root, flatten, payload_of
from arraycomm._dtypes import check_movable
from arraycomm._header import Agreement, Signature, Steps, array_of, exchange_details, in_header
from arraycomm._views import likeness, view, view_out

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator


def bcast(comm: Communicator, x: Any, root: int, like: Any, out: Any) -> Call:
    """See `Communicator.bcast`."""
    root = check_root(comm, root, "bcast")
    if comm.rank != root:
        return _bcast_to(comm, x, root, like, out)
    if x is None:
        raise TypeError("bcast: x is None on the root; the root passes the array to send")
    return _bcast_from(comm, view(x, "bcast"), root, out)


def _bcast_from(comm: Communicator, source: BufferView, root: int, out: Any) -> Call:
    check_movable(source.dtype, "bcast")
    flat, copies = flatten(source)
    target = Target(source, source.shape, source.dtype, out, "bcast", flat)
    # What the header has no room for is told in further steps, after which its payload is gone.
    description = None if in_header(source.dtype, source.shape) else _description(source)

    def finish(agreement: Agreement) -> Steps:
        if description is not None:
            yield from exchange_details(comm._board, {"array": description})
        if target.flat is not flat:
            np.copyto(target.flat, flat)
        if not inline:
            yield from _algorithms.bcast(comm._link, target.flat, root)
        return target.deliver()

    inline = description is None and flat.nbytes <= comm._inline
    return Call(
        Signature("bcast", None, root, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + 1,
    )


def _description(source: BufferView) -> str:
    """Say dtype and shape in a way that another rank can read; raise where that is not possible."""
    descr = np.lib.format.dtype_to_descr(source.dtype)
    if np.lib.format.descr_to_dtype(descr) != source.dtype:
        raise TypeError(
            f"bcast: dtype {source.dtype} cannot be described to the other ranks; send its fields "
            "one by one"
        )
    return repr((descr, source.shape))


def _bcast_to(comm: Communicator, x: Any, root: int, like: Any, out: Any) -> Call:
    kind = _wanted_kind(x, like, out)
    known = _known_array(x, out)
    target: Target | None = None
    if known is None:
        signature = Signature("bcast", None, root)
    else:
        check_movable(known.dtype, "bcast")
        signature = Signature("bcast", None, root, known.dtype, known.shape)
        target = Target(kind, known.shape, known.dtype, out, "bcast")

    def finish(agreement: Agreement) -> Steps:
        array = array_of(agreement.words, comm._slot_of(root))
        length = agreement.word(root, 13)
        if array is None:
            details = yield from exchange_details(comm._board, {})
            descr, shape = ast.literal_eval(details[root]["array"])
            array = np.lib.format.descr_to_dtype(descr), tuple(shape)
        dtype, shape = array
        into = target or Target(kind, shape, dtype, out, "bcast")
        if length >= 0:
            into.flat.view(np.uint8)[...] = agreement.payload(root, length)
        else:
            yield from _algorithms.bcast(comm._link, into.flat, root)
        return into.deliver()

    return Call(signature, finish)


def _known_array(x: Any, out: Any) -> BufferView | None:
    """Return the array that a rank which is not the root knows the result to be like, if any."""
    if x is not None:
        return view(x, "bcast")
    if out is None:
        return None
    found = view(out, "bcast")
    return view_out(out, found.shape, found.dtype, "bcast")


def _wanted_kind(x: Any, like: Any, out: Any) -> BufferView:
    """Return a view that tells what the result is like; its elements do not matter."""
    for name, example in (("x", x), ("like", like), ("out", out)):
        if example is not None:
            return likeness(example, "bcast", name)
    return view(np.empty(0), "bcast")


def allgather(comm: Communicator, x: Any, out: Any) -> Call:
    """See `Communicator.allgather`."""
    source = view(x, "allgather")
    check_movable(source.dtype, "allgather")
    flat, copies = flatten(source)
    target = Target(source, (comm.size, *source.shape), source.dtype, out, "allgather", flat)
    rows = target.flat.reshape(comm.size, -1) if flat.size else None

    def finish(agreement: Agreement) -> Steps:
        if rows is None:
            return target.deliver()
        if inline:
            for rank in range(comm.size):
                rows[rank] = agreement.payload(rank, flat.nbytes).view(flat.dtype)
        else:
            rows[comm.rank] = flat
            bounds = [flat.size * rank for rank in range(comm.size + 1)]
            yield from _algorithms.allgatherv(comm._link, target.flat, bounds)
        return target.deliver()

    inline = flat.nbytes <= comm._inline
    return Call(
        Signature("allgather", None, None, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes * comm.size,
        copies=copies + target.copies + 1,
        blind=True,
    )
