"""The v-forms of the movements: each rank may have another number of rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._calls.arguments import check_axis, check_counts, check_root
from arraycomm._calls.attempts import take_together
from arraycomm._calls.operation import ArrayOperation, Context
from arraycomm._checks import check_bool
from arraycomm._collectives.movements import Scatter, join_inline
from arraycomm._dtypes import DType
from arraycomm._protocol.agreement import Agreement, UndeliveredError
from arraycomm._protocol.announced import check_payload, check_size, check_table
from arraycomm._protocol.header import ANY
from arraycomm._reduce import algorithms
from arraycomm._reduce.blocks import bounds_of
from arraycomm._transports.base import Bytes, Steps


class Scatterv(Scatter):
    """See `Communicator.scatterv`. The counts travel with the header, the rows too if they fit."""

    name, code = "scatterv", 22
    uneven = True

    def __init__(
        self, context: Context, x: Any, counts: Any, root: int, like: Any, out: Any
    ) -> None:
        self._counts = counts
        super().__init__(context, x, root, like, out)

    def part_of_root(self) -> tuple[int, ...]:
        row = check_axis(self.source, "scatter")
        counts = check_counts(self._counts, self.group.size, self.source.shape[0])
        self.table = np.array(counts, np.int64)
        return (counts[self.root], *row)

    def expect(self, known: BufferView) -> None:
        check_axis(known, "scatter")

    def pack(self, room: int) -> Bytes | None:
        if not self.is_root or self.description is not None:
            return None
        # Says that the rows are there as well.
        self.word = int(self.table.nbytes + self.flat.nbytes <= room)
        return _pack_table(self, room)

    def move(self, payload: Bytes | None, dtype: DType, shape: tuple[int, ...]) -> Steps:
        # The root's own is right, whatever has become of its header.
        group, row = self.group, (self.source.shape if self.is_root else shape)[1:]
        table = self.table if self.is_root else np.empty(group.size, np.int64)
        if payload is None:
            yield from algorithms.bcast(group.transport, table, self.root)
        elif not self.is_root:
            check_payload(self.root, len(payload[: table.nbytes]), table.nbytes)
            table[...] = payload[: table.nbytes].view(np.int64)
        counts = table.tolist()
        check_table(self.root, counts, sum(counts))
        check_size(self.root, (counts[group.rank], *row), dtype.itemsize)
        if not self.is_root:
            self.target = self.make_target(dtype, (counts[group.rank], *row), deferred=True)
        rows = payload[table.nbytes :] if payload is not None and self.flag else None
        yield from self.scatter(rows, bounds_of(counts, prod(row)))


class OfAnyLength(ArrayOperation):
    """An operation on arrays whose axis 0 may have another length on each rank."""

    # The operation on arrays without an axis 0.
    same_length: ClassVar[str]
    # How many rows of each rank are in the result.
    received: list[int]

    def __init__(
        self, context: Context, x: Any, return_counts: bool, out: Any, root: int | None = None
    ) -> None:
        super().__init__(context, x, out)
        self.root, self._out = root, out
        self._return_counts = check_bool(return_counts, "return_counts")
        self.row = check_axis(self.source, self.same_length)
        self.signature = self.sign(None, root, (ANY, *self.row))
        self.word = self.source.shape[0]
        self.copies += 1

    def take(self, *, must_not_alias: bool) -> None:
        """Take memory for the rows that are received."""
        shape = (sum(self.received), *self.row)
        self.target = self.make_target(
            shape, self._out, must_not_alias=must_not_alias, deferred=True
        )

    def result(self, agreement: Agreement) -> Any:
        result = super().result(agreement)
        with_counts = self._return_counts and self.target is not None
        return (result, self.received) if with_counts else result


class Allgatherv(OfAnyLength):
    """See `Communicator.allgatherv`."""

    name, code = "allgatherv", 6
    same_length = "allgather"

    def steps(self, agreement: Agreement) -> Steps:
        elements, dtype = prod(self.row), self.source.dtype
        self.received = agreement.lengths(elements * dtype.itemsize, empty=not elements)
        _check_rows(self.received, self.row, dtype)
        check_table(self.group.rank, [self.received[self.group.rank]], self.word)
        bounds = bounds_of(self.received, elements)
        longest = max(self.received)
        check_size(self.received.index(longest), bounds[-1:], dtype.itemsize)
        if longest * elements * dtype.itemsize > self.placement.inline_bytes:
            nbytes, link = bounds[-1] * dtype.itemsize, self.placement.link
            yield from take_together(self.group, self.name, nbytes, self._take_target)
            yield from algorithms.gatherv(link, self.flat, self.into, bounds, self.root)
            return
        self._take_target()
        if self.target is not None:
            join_inline(agreement, bounds, self.target.flat)

    def _take_target(self) -> None:
        if self.root in {None, self.group.rank}:
            self.take(must_not_alias=self.root is not None)


class Gatherv(Allgatherv):
    """See `Communicator.gatherv`."""

    name, code = "gatherv", 20
    same_length = "gather"

    def __init__(self, context: Context, x: Any, root: int, return_counts: bool, out: Any) -> None:
        super().__init__(context, x, return_counts, out, check_root(root, context.group.size))


class Alltoallv(OfAnyLength):
    """See `Communicator.alltoallv`. The counts travel with the header, the rows too if they fit."""

    name, code = "alltoallv", 24
    same_length = "alltoall"

    def __init__(
        self, context: Context, x: Any, counts: Any, return_counts: bool, out: Any
    ) -> None:
        super().__init__(context, x, return_counts, out)
        self.counts = check_counts(counts, self.group.size, self.word)
        self.table = np.array(self.counts, np.int64)

    def pack(self, room: int) -> Bytes | None:
        return _pack_table(self, room)

    def steps(self, agreement: Agreement) -> Steps:
        group, elements, dtype = self.group, prod(self.row), self.flat.dtype
        tables, data = yield from self._tables(agreement, elements * dtype.itemsize)
        for rank, counts in enumerate(tables.tolist()):
            check_table(rank, counts, self.words[rank])
            check_size(rank, [counts[group.rank]], elements * dtype.itemsize)
        for received in () if elements else zip(*tables.tolist(), strict=True):
            _check_rows(received, self.row, dtype)
        self.received = tables[:, group.rank].tolist()
        if data is None:
            nbytes = int(tables.sum()) * elements * dtype.itemsize
            take = partial(self.take, must_not_alias=True)
            yield from take_together(group, self.name, nbytes, take)
        else:
            self.take(must_not_alias=True)
        flat, into, link = self.flat, self.into, self.placement.link
        places = bounds_of(self.received, elements)
        if data is None:
            longest = int(tables.max()) * elements
            bounds = bounds_of(self.counts, elements)
            yield from algorithms.alltoallv(link, flat, bounds, into, places, longest)
            return
        for rank, (start, end) in enumerate(pairwise(places)):
            first = int(tables[rank, : group.rank].sum()) * elements
            into[start:end] = data[rank].view(dtype)[first : first + end - start]

    def _tables(self, agreement: Agreement, row_bytes: int) -> Steps:
        """Return how many rows each rank sends to each, and their data if it came along."""
        group, width = self.group, self.table.nbytes
        self.words = lengths = agreement.lengths(empty=not row_bytes)
        tables = np.empty((group.size, group.size), np.int64)
        if width > group.inline_bytes:
            tables[group.rank] = self.table
            bounds = bounds_of([group.size] * group.size)
            yield from algorithms.allgatherv(group.transport, tables.reshape(-1), bounds)
            return tables, None
        for rank in range(group.size):
            tables[rank] = agreement.payload(rank, width).view(np.int64)
        if width + max(lengths) * row_bytes > self.placement.inline_bytes:
            return tables, None
        ends = [width + length * row_bytes for length in lengths]
        return tables, [agreement.payload(rank, end)[width:] for rank, end in enumerate(ends)]


def _check_rows(received: Sequence[int], row: Sequence[int], dtype: DType) -> None:
    """Raise if rows, which may be empty, are more than one array can have."""
    rows = sum(received)
    if prod([rows, *filter(None, row)]) * dtype.itemsize > sys.maxsize:
        raise UndeliveredError(ValueError(f"no array can have the {rows} rows of all arrays"))


def _pack_table(operation: Scatterv | Alltoallv, room: int) -> Bytes | None:
    """Return the counts as bytes, with the rows behind them if both fit; None if neither does."""
    table, flat = operation.table.view(np.uint8), operation.flat
    if table.nbytes + flat.nbytes <= room:
        return np.concatenate([table, flat.view(np.uint8)])
    return table if table.nbytes <= operation.group.inline_bytes else None
