"""The collectives that move arrays and leave them as they are, as calls: see `_calls.py`.

A function here looks at its arguments, raises what is wrong with them, and returns a `Call`.
"""

from __future__ import annotations

import ast
import math
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.views import result_prototype, view
from arraycomm._collectives import algorithms
from arraycomm._collectives.operation import (
    Call,
    bounds_of,
    check_axis,
    check_counts,
    check_root,
    check_rows,
    flatten,
    lengths_of,
    payload_of,
)
from arraycomm._collectives.placement import DeferredResultBuffer, HostPlacement, Place
from arraycomm._dtypes import BY_DTYPE, BY_NAME, DType, check_movable, name_of
from arraycomm._protocol.header import (
    ANY,
    Agreement,
    Signature,
    Steps,
    array_of,
    exchange_details,
    in_header,
)
from arraycomm._transports.base import Bytes, Flat

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator

Array = np.ndarray[Any, Any]

_parsing = Lock()


def bcast(comm: Communicator, x: Any, root: int, like: Any, out: Any) -> Call:
    """See `Communicator.bcast`."""
    root = check_root(comm, root, "bcast")
    if comm.rank != root:
        return _bcast_to(comm, x, root, like, out)
    return _bcast_from(comm, _sent(comm, x, "bcast"), root, out)


def _sent(comm: Communicator, x: Any, operation: str) -> BufferView:
    if x is None:
        raise TypeError(f"{operation}: x is None on the root; the root passes the array to send")
    source = comm._placement.view(x, operation)
    check_movable(source.dtype, operation)
    return source


def _bcast_from(comm: Communicator, source: BufferView, root: int, out: Any) -> Call:
    placement = comm._placement
    flat, copies = flatten(source)
    target = placement.target(source, source.shape, source.dtype, out, "bcast", flat)
    description = describe(source.dtype, source.shape, "bcast")

    def finish(agreement: Agreement) -> Steps:
        if description is not None:
            yield from exchange_details(comm._control, {"array": description})
        if target.flat is not flat:
            target.flat[...] = flat
        if not inline:
            yield from algorithms.bcast(placement.link, target.flat, root)
        return target.deliver()

    inline = description is None and placement.inline(flat)
    return Call(
        Signature("bcast", None, root, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + 1,
        placement=placement,
    )


def describe(dtype: DType, shape: tuple[int, ...], operation: str) -> str | None:
    """Say dtype and shape in a way that another rank can read, where the header has no room for it.

    It is told in further steps, after which the header's payload is gone.
    """
    if in_header(dtype, shape):
        return None
    try:
        descr: Any = name_of(dtype) if dtype in BY_DTYPE else np.lib.format.dtype_to_descr(dtype)
        faithful = parse_description(descr) == dtype
    except ValueError:
        # Of fields that overlap, or that are not in the order of their offsets.
        faithful = False
    if not faithful:
        raise TypeError(
            f"{operation}: dtype {dtype} cannot be described to the other ranks; send its fields "
            "one by one"
        )
    return repr((descr, shape))


def parse_description(descr: Any) -> DType:
    """Return the dtype that is told as a name of ours, or as the format of .npy files tells it."""
    known = BY_NAME.get(descr) if isinstance(descr, str) else None
    return np.lib.format.descr_to_dtype(descr) if known is None else known.dtype


def parse(said: str) -> tuple[DType, tuple[int, ...]]:
    """Return the dtype and shape that `describe` tells."""
    # Two threads of one interpreter may not be in the making of a syntax tree at once: CPython 3.11
    # counts their depths in one place, and raises SystemError.
    with _parsing:
        descr, shape = ast.literal_eval(said)
    return parse_description(descr), tuple(shape)


def _announced(comm: Communicator, agreement: Agreement, root: int) -> Steps:
    """Return the dtype and shape that the root has announced."""
    array = array_of(agreement.words, comm._slot_of(root))
    if array is None:
        details = yield from exchange_details(comm._control, {})
        array = parse(details[root]["array"])
    return array


def _bcast_to(comm: Communicator, x: Any, root: int, like: Any, out: Any) -> Call:
    placement = comm._placement
    kind = wanted_kind(x, like, out, "bcast")
    known = placement.known(x, out, "bcast")
    target: Place | None = None
    if known is None:
        signature = Signature("bcast", None, root)
    else:
        check_movable(known.dtype, "bcast")
        signature = Signature("bcast", None, root, known.dtype, known.shape)
        target = placement.target(kind, known.shape, known.dtype, out, "bcast")

    def finish(agreement: Agreement) -> Steps:
        length = agreement.word(root, 13)
        dtype, shape = yield from _announced(comm, agreement, root)
        into = target or placement.target(kind, shape, dtype, out, "bcast")
        if length >= 0 and placement.host:
            into.flat.view(np.uint8)[...] = agreement.payload(root, length)
        else:
            yield from algorithms.bcast(placement.link, into.flat, root)
        return into.deliver()

    return Call(signature, finish, placement=placement)


def wanted_kind(x: Any, like: Any, out: Any, operation: str) -> BufferView:
    """Return a view that tells what the result is like; its elements do not matter."""
    for name, example in (("x", x), ("like", like), ("out", out)):
        if example is not None:
            return result_prototype(example, operation, name)
    return view(np.empty(0), operation)


def allgather(comm: Communicator, x: Any, out: Any) -> Call:
    """See `Communicator.allgather`."""
    placement = comm._placement
    source = placement.view(x, "allgather")
    check_movable(source.dtype, "allgather")
    flat, copies = flatten(source)
    target = placement.target(
        source, (comm.size, *source.shape), source.dtype, out, "allgather", flat
    )
    bounds = [flat.size * rank for rank in range(comm.size + 1)]

    def finish(agreement: Agreement) -> Steps:
        if inline:
            _join_inline(agreement, bounds, target.flat)
        elif flat.size:
            target.flat[bounds[comm.rank] : bounds[comm.rank + 1]] = flat
            yield from algorithms.allgatherv(placement.link, target.flat, bounds)
        return target.deliver()

    inline = placement.inline(flat)
    return Call(
        Signature("allgather", None, None, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + target.copies + 1,
        blind=True,
        placement=placement,
    )


def allgatherv(comm: Communicator, x: Any, return_counts: bool, out: Any) -> Call:
    """See `Communicator.allgatherv`."""
    return _joined(comm, x, None, return_counts, out, "allgatherv", "allgather")


def gatherv(comm: Communicator, x: Any, root: int, return_counts: bool, out: Any) -> Call:
    """See `Communicator.gatherv`."""
    root = check_root(comm, root, "gatherv")
    return _joined(comm, x, root, return_counts, out, "gatherv", "gather")


def _joined(
    comm: Communicator,
    x: Any,
    root: int | None,
    return_counts: bool,
    out: Any,
    operation: str,
    otherwise: str,
) -> Call:
    """Join everyone's rows on `root`, or on every rank where that is None."""
    placement = comm._placement
    source = placement.view(x, operation)
    check_movable(source.dtype, operation)
    row = check_axis(source, operation, otherwise)
    flat, copies = flatten(source)
    elements = math.prod(row)

    def finish(agreement: Agreement) -> Steps:
        counts = lengths_of(agreement, comm.size)
        bounds = bounds_of(counts, elements)
        target = None
        if root in {None, comm.rank}:
            shape = (sum(counts), *row)
            must_not_alias = root is not None
            target = DeferredResultBuffer(
                placement,
                source,
                shape,
                source.dtype,
                out,
                operation,
                flat,
                must_not_alias=must_not_alias,
            )
        if placement.host and max(counts) * elements * flat.itemsize <= comm._inline:
            if target is not None:
                _join_inline(agreement, bounds, target.flat)
        elif root is not None:
            into = None if target is None else target.flat
            yield from algorithms.gatherv(placement.link, flat, into, bounds, root)
        elif target is not None:
            target.flat[bounds[comm.rank] : bounds[comm.rank + 1]] = flat
            yield from algorithms.allgatherv(placement.link, target.flat, bounds)
        if target is None:
            return None
        result = target.deliver()
        return (result, counts) if return_counts else result

    return Call(
        Signature(operation, None, root, source.dtype, (ANY, *row)),
        finish,
        payload_of(flat, placement.inline(flat)),
        source.shape[0],
        nbytes=flat.nbytes,
        copies=copies + 1,
        placement=placement,
    )


def _join_inline(agreement: Agreement, bounds: list[int], target: Array) -> None:
    """Put what came with the headers, one part a rank, into one array."""
    for rank, (start, end) in enumerate(pairwise(bounds)):
        part = target[start:end]
        part[...] = agreement.payload(rank, part.nbytes).view(part.dtype)


def gather(comm: Communicator, x: Any, root: int, out: Any) -> Call:
    """See `Communicator.gather`."""
    root = check_root(comm, root, "gather")
    placement = comm._placement
    source = placement.view(x, "gather")
    check_movable(source.dtype, "gather")
    flat, copies = flatten(source)
    target = None
    if comm.rank == root:
        shape = (comm.size, *source.shape)
        target = placement.target(
            source, shape, source.dtype, out, "gather", flat, must_not_alias=True
        )
    bounds = bounds_of([flat.size] * comm.size)

    def finish(agreement: Agreement) -> Steps:
        if not inline:
            into = None if target is None else target.flat
            yield from algorithms.gatherv(placement.link, flat, into, bounds, root)
        elif target is not None:
            _join_inline(agreement, bounds, target.flat)
        return None if target is None else target.deliver()

    inline = placement.inline(flat)
    return Call(
        Signature("gather", None, root, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + (target.copies + 1 if target else 0),
        blind=True,
        placement=placement,
    )


def scatter(comm: Communicator, x: Any, root: int, like: Any, out: Any) -> Call:
    """See `Communicator.scatter`."""
    root = check_root(comm, root, "scatter")
    if comm.rank == root:
        return _scatter_from(comm, _sent(comm, x, "scatter"), root, out)
    return _scatter_to(comm, root, like, out)


def _scatter_from(comm: Communicator, source: BufferView, root: int, out: Any) -> Call:
    placement = comm._placement
    shape = check_rows(source, comm.size, "scatter")
    flat, copies = flatten(source)
    target = placement.target(
        source, shape, source.dtype, out, "scatter", flat, must_not_alias=True
    )
    description = describe(source.dtype, shape, "scatter")
    bounds = bounds_of([target.flat.size] * comm.size)

    def finish(agreement: Agreement) -> Steps:
        if description is not None:
            yield from exchange_details(comm._control, {"array": description})
        if inline:
            target.flat[...] = flat[bounds[root] : bounds[root + 1]]
        else:
            yield from algorithms.scatterv(placement.link, flat, target.flat, bounds, root)
        return target.deliver()

    inline = description is None and placement.inline(flat)
    return Call(
        Signature("scatter", None, root, source.dtype, shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + target.copies + 1,
        placement=placement,
    )


def _scatter_to(comm: Communicator, root: int, like: Any, out: Any) -> Call:
    placement = comm._placement
    kind = wanted_kind(None, like, out, "scatter")
    known = placement.known(None, out, "scatter")
    target: Place | None = None
    signature = Signature("scatter", None, root)
    if known is not None:
        signature = Signature("scatter", None, root, known.dtype, known.shape)
        target = placement.target(kind, known.shape, known.dtype, out, "scatter")

    def finish(agreement: Agreement) -> Steps:
        length = agreement.word(root, 13)
        dtype, shape = yield from _announced(comm, agreement, root)
        into = target or placement.target(kind, shape, dtype, out, "scatter")
        bounds = bounds_of([into.flat.size] * comm.size)
        if length >= 0 and placement.host:
            rows = agreement.payload(root, length).view(dtype)
            into.flat[...] = rows[bounds[comm.rank] : bounds[comm.rank + 1]]
        else:
            yield from algorithms.scatterv(placement.link, None, into.flat, bounds, root)
        return into.deliver()

    return Call(signature, finish, placement=placement)


def scatterv(comm: Communicator, x: Any, counts: Any, root: int, like: Any, out: Any) -> Call:
    """See `Communicator.scatterv`."""
    root = check_root(comm, root, "scatterv")
    if comm.rank == root:
        return _scatterv_from(comm, _sent(comm, x, "scatterv"), counts, root, out)
    return _scatterv_to(comm, root, like, out)


def _scatterv_from(
    comm: Communicator, source: BufferView, counts: Any, root: int, out: Any
) -> Call:
    placement = comm._placement
    row = check_axis(source, "scatterv", "scatter")
    counts = check_counts(counts, comm.size, source.shape[0], "scatterv")
    flat, copies = flatten(source)
    shape = (counts[root], *row)
    target = placement.target(
        source, shape, source.dtype, out, "scatterv", flat, must_not_alias=True
    )
    description = describe(source.dtype, (ANY, *row), "scatterv")
    bounds = bounds_of(counts, math.prod(row))
    table = np.array(counts, np.int64)

    def finish(agreement: Agreement) -> Steps:
        if description is not None:
            yield from exchange_details(comm._control, {"array": description})
        if payload is None:
            yield from algorithms.bcast(comm._link, table, root)
        if inline:
            target.flat[...] = flat[bounds[root] : bounds[root + 1]]
        else:
            yield from algorithms.scatterv(placement.link, flat, target.flat, bounds, root)
        return target.deliver()

    payload, inline = _with_data(comm, placement, table, flat)
    if description is not None:
        payload, inline = None, False
    return Call(
        Signature("scatterv", None, root, source.dtype, (ANY, *row)),
        finish,
        payload,
        int(inline),
        nbytes=flat.nbytes,
        copies=copies + target.copies + 1,
        placement=placement,
    )


def _with_data(
    comm: Communicator, placement: HostPlacement, table: Array, flat: Flat
) -> tuple[Bytes | None, bool]:
    """Return what of the counts and the data fits in the header, and whether both do."""
    if placement.host and table.nbytes + flat.nbytes <= comm._inline:
        return np.concatenate([table.view(np.uint8), flat.view(np.uint8)]), True
    if table.nbytes <= comm._inline:
        return table.view(np.uint8), False
    return None, False


def _scatterv_to(comm: Communicator, root: int, like: Any, out: Any) -> Call:
    placement = comm._placement
    kind = wanted_kind(None, like, out, "scatterv")
    known = placement.known(None, out, "scatterv")
    signature = Signature("scatterv", None, root)
    if known is not None:
        row = check_axis(known, "scatterv", "scatter")
        signature = Signature("scatterv", None, root, known.dtype, (ANY, *row))

    def finish(agreement: Agreement) -> Steps:
        length, inline = agreement.word(root, 13), agreement.word(root, 14)
        data = agreement.payload(root, max(length, 0)).copy()
        dtype, (_, *row) = yield from _announced(comm, agreement, root)
        table = np.empty(comm.size, np.int64)
        if length < 0:
            yield from algorithms.bcast(comm._link, table, root)
        else:
            table[...] = data[: table.nbytes].view(np.int64)
        counts = table.tolist()
        bounds = bounds_of(counts, math.prod(row))
        into = DeferredResultBuffer(
            placement, kind, (counts[comm.rank], *row), dtype, out, "scatterv"
        )
        if inline and placement.host:
            elements = data[table.nbytes :].view(dtype)
            into.flat[...] = elements[bounds[comm.rank] : bounds[comm.rank + 1]]
        else:
            yield from algorithms.scatterv(placement.link, None, into.flat, bounds, root)
        return into.deliver()

    return Call(signature, finish, placement=placement)


def alltoall(comm: Communicator, x: Any, out: Any) -> Call:
    """See `Communicator.alltoall`."""
    placement = comm._placement
    source = placement.view(x, "alltoall")
    check_movable(source.dtype, "alltoall")
    check_rows(source, comm.size, "alltoall")
    flat, copies = flatten(source)
    target = placement.target(
        source, source.shape, source.dtype, out, "alltoall", flat, must_not_alias=True
    )
    count = flat.size // comm.size
    bounds = bounds_of([count] * comm.size)

    def finish(agreement: Agreement) -> Steps:
        if inline:
            mine = slice(bounds[comm.rank], bounds[comm.rank + 1])
            for rank, (start, end) in enumerate(pairwise(bounds)):
                sent = agreement.payload(rank, flat.nbytes).view(flat.dtype)
                target.flat[start:end] = sent[mine]
        else:
            link = placement.link
            yield from algorithms.alltoallv(link, flat, bounds, target.flat, bounds, count)
        return target.deliver()

    inline = placement.inline(flat)
    return Call(
        Signature("alltoall", None, None, source.dtype, source.shape),
        finish,
        payload_of(flat, inline),
        nbytes=flat.nbytes,
        copies=copies + target.copies + 1,
        blind=True,
        placement=placement,
    )


def alltoallv(comm: Communicator, x: Any, counts: Any, return_counts: bool, out: Any) -> Call:
    """See `Communicator.alltoallv`."""
    placement = comm._placement
    source = placement.view(x, "alltoallv")
    check_movable(source.dtype, "alltoallv")
    row = check_axis(source, "alltoallv", "alltoall")
    counts = check_counts(counts, comm.size, source.shape[0], "alltoallv")
    flat, copies = flatten(source)
    elements = math.prod(row)
    table = np.array(counts, np.int64)

    def finish(agreement: Agreement) -> Steps:
        lengths = lengths_of(agreement, comm.size)
        row_bytes = elements * flat.itemsize
        tables, data = yield from _everyones_counts(
            comm, placement, agreement, table, lengths, row_bytes
        )
        received = tables[:, comm.rank].tolist()
        shape = (sum(received), *row)
        target = DeferredResultBuffer(
            placement, source, shape, source.dtype, out, "alltoallv", flat, must_not_alias=True
        )
        into = bounds_of(received, elements)
        if data is None:
            longest = int(tables.max()) * elements
            bounds = bounds_of(counts, elements)
            link = placement.link
            yield from algorithms.alltoallv(link, flat, bounds, target.flat, into, longest)
        else:
            for rank, (start, end) in enumerate(pairwise(into)):
                first = int(tables[rank, : comm.rank].sum()) * elements
                target.flat[start:end] = data[rank].view(flat.dtype)[first : first + end - start]
        result = target.deliver()
        return (result, received) if return_counts else result

    return Call(
        Signature("alltoallv", None, None, source.dtype, (ANY, *row)),
        finish,
        _with_data(comm, placement, table, flat)[0],
        source.shape[0],
        nbytes=flat.nbytes,
        copies=copies + 1,
        placement=placement,
    )


def _everyones_counts(
    comm: Communicator,
    placement: HostPlacement,
    agreement: Agreement,
    table: Array,
    lengths: list[int],
    row_bytes: int,
) -> Steps:
    """Return how many rows each rank sends to each, and their data where it came along."""
    size, width = comm.size, table.nbytes
    tables = np.empty((size, size), np.int64)
    if width > comm._inline:
        tables[comm.rank] = table
        bounds = bounds_of([size] * size)
        yield from algorithms.allgatherv(comm._link, tables.reshape(-1), bounds)
        return tables, None
    for rank in range(size):
        tables[rank] = agreement.payload(rank, width).view(np.int64)
    if not placement.host or width + max(lengths) * row_bytes > comm._inline:
        return tables, None
    ends = [width + length * row_bytes for length in lengths]
    return tables, [agreement.payload(rank, end)[width:] for rank, end in enumerate(ends)]
