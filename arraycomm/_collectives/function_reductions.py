"""Reductions by a function of the user's: on one rank, or slice by slice if that is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._calls.custom_ops import Folding, Op
from arraycomm._calls.operation import ArrayOperation
from arraycomm._protocol.agreement import Agreement
from arraycomm._reduce import algorithms
from arraycomm._reduce.blocks import bounds_of
from arraycomm._reduce.chunks import slices
from arraycomm._transports.base import Steps


def reduce(
    call: ArrayOperation, op: Op, agreement: Agreement, target: Array | None, root: int | None
) -> Steps:
    """Reduce into the target of `root`, or of every rank if that is None."""
    group, flat, link = call.group, call.flat, call.placement.link
    folding = Folding(group, call.name, op, call.source)
    if op.elementwise and call.payload is None:
        bounds = slices(flat.size, group.size)
        rows = yield from _rows_of_slice(call, bounds)
        part = np.empty(bounds[group.rank + 1] - bounds[group.rank], flat.dtype)
        yield from folding.together(lambda: folding.fold(rows, part.shape, part))
        yield from algorithms.gatherv(link, part, target, bounds, root)
        return
    rows = yield from _rows_on(call, folding, agreement, root or 0)

    def attempt() -> None:
        assert target is not None
        folding.fold(rows, call.source.shape, target)

    yield from folding.together(None if rows is None else attempt)
    if root is None and target is not None:
        yield from algorithms.bcast(link, target, 0)


def reduce_scatter(
    call: ArrayOperation, op: Op, agreement: Agreement, bounds: Sequence[int], target: Array
) -> Steps:
    """Reduce each rank's part, from element bounds[r], on that rank, or all parts on rank 0."""
    group, flat = call.group, call.flat
    folding = Folding(group, call.name, op, call.source)
    if op.elementwise:
        rows = yield from _rows_of_slice(call, bounds)
        yield from folding.together(lambda: folding.fold(rows, target.shape, target))
        return
    rows = yield from _rows_on(call, folding, agreement, 0)
    whole = None if rows is None else np.empty(flat.size, flat.dtype)

    def attempt() -> None:
        assert whole is not None
        folding.fold(rows, call.source.shape, whole)

    yield from folding.together(None if rows is None else attempt)
    yield from algorithms.scatterv(call.placement.link, whole, target, bounds, 0)


def scan(
    call: ArrayOperation, op: Op, agreement: Agreement, target: Array | None, inclusive: bool
) -> Steps:
    """Fold all prefixes on rank 0, which then sends each rank its own."""
    group, flat = call.group, call.flat
    folding = Folding(group, call.name, op, call.source)
    rows = yield from _rows_on(call, folding, agreement, 0)
    made = None if rows is None else np.empty((group.size, flat.size), flat.dtype)

    def attempt() -> None:
        assert made is not None
        for place, prefix in enumerate(folding.prefixes(rows, call.source.shape)):
            made[place] = prefix

    yield from folding.together(None if made is None else attempt)
    if made is not None and not inclusive:
        made = np.roll(made, 1, axis=0)
    local = np.empty(flat.size, flat.dtype)
    sent = None if made is None else made.reshape(-1)
    bounds = bounds_of([flat.size] * group.size)
    yield from algorithms.scatterv(call.placement.link, sent, local, bounds, 0)
    if target is not None:
        target[...] = local


def _rows_on(call: ArrayOperation, folding: Folding, agreement: Agreement, rank: int) -> Steps:
    """Return every rank's elements on `rank`, None on the others."""
    group, flat = call.group, call.flat
    if call.payload is not None:
        # Copies, since further steps take the place of the headers.
        return [row.copy() for row in call.rows(agreement)] if group.rank == rank else None
    into = yield from folding.together(
        (lambda: np.empty(flat.size * group.size, flat.dtype)) if group.rank == rank else None
    )
    bounds = bounds_of([flat.size] * group.size)
    yield from algorithms.gatherv(call.placement.link, flat, into, bounds, rank)
    return None if into is None else list(into.reshape(group.size, -1))


def _rows_of_slice(call: ArrayOperation, bounds: Sequence[int]) -> Steps:
    """Send rank r the elements from bounds[r]; return what every rank has for this one."""
    group, flat = call.group, call.flat
    lengths = [end - start for start, end in pairwise(bounds)]
    count = lengths[group.rank]
    into = np.empty(count * group.size, flat.dtype)
    link, ends = call.placement.link, bounds_of([count] * group.size)
    yield from algorithms.alltoallv(link, flat, bounds, into, ends, max(lengths))
    return list(into.reshape(group.size, count))
