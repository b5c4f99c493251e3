"""The collectives that move arrays and leave them as they are: see `operation.py`."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._collectives import algorithms
from arraycomm._collectives.arguments import check_axis, check_counts, check_root, check_rows
from arraycomm._collectives.attempts import take_together
from arraycomm._collectives.operation import ArrayOperation, Context, Operation, bounds_of
from arraycomm._collectives.placement import DeferredResultBuffer, ResultBuffer, flatten
from arraycomm._collectives.refusals import (
    announced,
    check_taken,
    framework_code,
    like_root,
    wanted_kind,
)
from arraycomm._dtypes import DType, check_movable
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.announced import check_payload, check_size, check_table
from arraycomm._protocol.details import Description, Nothing, description_of, exchange_details
from arraycomm._protocol.header import ANY, Signature
from arraycomm._transports.base import Bytes, Flat, Steps


def _join_inline(agreement: Agreement, bounds: list[int], target: Array) -> None:
    """Put what came with the headers, one part a rank, into one array."""
    for rank, (start, end) in enumerate(pairwise(bounds)):
        part = target[start:end]
        part[...] = agreement.payload(rank, part.nbytes).view(part.dtype)


# From one rank to all ------------------------------------------------------------------------------


class FromRoot(Operation):
    """The root's array goes to all ranks; the others need not know its dtype and shape."""

    description: Description | None = None
    target: ResultBuffer | None = None
    source: BufferView
    flat: Flat
    # What the root announces beside its array.
    flag: int

    def __init__(self, context: Context, x: Any, root: int, like: Any, out: Any) -> None:
        self.root = check_root(root, context.group.size)
        super().__init__(context, context.place(x, like, out))
        self.out = out
        self.is_root = self.group.rank == self.root
        if self.is_root:
            self._look_at(x)
        else:
            self.kind = wanted_kind(x, like, out)
            self.length = announced(self.kind)

    def _look_at(self, x: Any) -> None:
        if x is None:
            raise TypeError("x is None on the root; the root passes the array to send")
        self.source = self.placement.view(x)
        check_movable(self.source.dtype)
        self.flat, self.copies = flatten(self.source)
        self.nbytes = self.flat.nbytes
        self.kind = self.source

    def sign(self, dtype: DType | None = None, shape: tuple[int, ...] | None = None) -> None:
        """Set the signature of a call with an array of this dtype and shape, if they are known."""
        self.signature = Signature(self.name, None, self.root, dtype, shape)
        if self.is_root and dtype is not None and shape is not None:
            self.description = Description.if_needed(dtype, shape)

    def make_target(
        self, like: BufferView, shape: tuple[int, ...], dtype: DType, source: Flat | None = None
    ) -> ResultBuffer:
        """Return where this rank's part goes."""
        target = self.placement.result(
            like, shape, dtype, self.out, source, must_not_alias=self.name != "bcast"
        )
        self.copies += target.copies
        return target

    def pack(self, room: int) -> Bytes | None:
        if not self.is_root or self.description is not None or self.flat.nbytes > room:
            return None
        payload: Bytes = self.flat.view(np.uint8)
        return payload

    def steps(self, agreement: Agreement) -> Steps:
        # Read before further steps take the place of the headers.
        lengths, rank = agreement.lengths(), self.group.rank
        self.flag, lengths[self.root] = lengths[self.root], 0
        nbytes, array = agreement.payload_bytes(self.root), agreement.array(self.root)
        some_unknown = nbytes < 0 and 0 in map(agreement.array_digest, range(self.group.size))
        payload = None if nbytes < 0 else agreement.payload(self.root, nbytes)
        if array is None:
            announcement = self.description or Nothing()
            details = yield from exchange_details(
                self.group.control, announcement, Nothing, Description
            )
            array = description_of(self.root, details[self.root])
        self.kind = like_root(self.kind, self.flag, array[0])
        check_taken(self.name, lengths, rank, self.kind, array[0])
        if some_unknown:
            yield from self._take_target(*array)
        yield from self.send() if self.is_root else self.receive(payload, *array)

    def _take_target(self, dtype: DType, shape: tuple[int, ...]) -> Steps:
        def take() -> None:
            if ANY not in shape:
                self.target = self.target or self.make_target(self.kind, shape, dtype)

        yield from take_together(self.group, self.name, prod(shape) * dtype.itemsize, take)

    def send(self) -> Steps:
        """Move the elements from the root."""
        raise NotImplementedError

    def receive(self, payload: Bytes | None, dtype: DType, shape: tuple[int, ...]) -> Steps:
        """Take elements of the root's dtype and shape; `payload` is what came with its header."""
        raise NotImplementedError

    def result(self, agreement: Agreement) -> Any:
        assert self.target is not None
        return self.target.deliver()


class Bcast(FromRoot):
    """See `Communicator.bcast`."""

    name, code = "bcast", 4

    def __init__(self, context: Context, x: Any, root: int, like: Any, out: Any) -> None:
        super().__init__(context, x, root, like, out)
        if self.is_root:
            source = self.source
            self.target = self.make_target(source, source.shape, source.dtype, self.flat)
            self.sign(source.dtype, source.shape)
            self.length = framework_code(source)
        elif (known := self.placement.view_known(x, out)) is not None:
            check_movable(known.dtype)
            self.target = self.make_target(self.kind, known.shape, known.dtype)
            self.sign(known.dtype, known.shape)
        else:
            self.sign()

    def send(self) -> Steps:
        assert self.target is not None
        if self.target.flat is not self.flat:
            self.target.flat[...] = self.flat
        if self.payload is None:
            yield from algorithms.bcast(self.placement.link, self.target.flat, self.root)

    def receive(self, payload: Bytes | None, dtype: DType, shape: tuple[int, ...]) -> Steps:
        check_size(self.root, shape, dtype.itemsize)
        self.target = self.target or self.make_target(self.kind, shape, dtype)
        into = self.target.flat
        if payload is not None and self.placement.host:
            check_payload(self.root, len(payload), into.nbytes)
            into.view(np.uint8)[...] = payload
        else:
            yield from algorithms.bcast(self.placement.link, into, self.root)


class Scatter(FromRoot):
    """See `Communicator.scatter`."""

    name, code = "scatter", 21

    def __init__(self, context: Context, x: Any, root: int, like: Any, out: Any) -> None:
        super().__init__(context, x if context.group.rank == root else None, root, like, out)
        if self.is_root:
            shape, dtype = check_rows(self.source, self.group.size), self.source.dtype
            self.target = self.make_target(self.source, shape, dtype, self.flat)
            self.sign(dtype, shape)
        elif (known := self.placement.view_known(None, out)) is not None:
            self.target = self.make_target(self.kind, known.shape, known.dtype)
            self.sign(known.dtype, known.shape)
        else:
            self.sign()

    def send(self) -> Steps:
        assert self.target is not None
        into, count = self.target.flat, self.target.flat.size
        if self.payload is not None:
            into[...] = self.flat[self.root * count : (self.root + 1) * count]
            return
        bounds = bounds_of([count] * self.group.size)
        yield from algorithms.scatterv(self.placement.link, self.flat, into, bounds, self.root)

    def receive(self, payload: Bytes | None, dtype: DType, shape: tuple[int, ...]) -> Steps:
        check_size(self.root, shape, dtype.itemsize)
        self.target = self.target or self.make_target(self.kind, shape, dtype)
        into, rank = self.target.flat, self.group.rank
        if payload is not None and self.placement.host:
            check_payload(self.root, len(payload), into.nbytes * self.group.size)
            rows = payload.view(dtype)
            into[...] = rows[rank * into.size : (rank + 1) * into.size]
            return
        bounds = bounds_of([into.size] * self.group.size)
        yield from algorithms.scatterv(self.placement.link, None, into, bounds, self.root)


class Scatterv(FromRoot):
    """See `Communicator.scatterv`. The counts travel with the header, the rows too if they fit."""

    name, code = "scatterv", 22

    def __init__(
        self, context: Context, x: Any, counts: Any, root: int, like: Any, out: Any
    ) -> None:
        super().__init__(context, x if context.group.rank == root else None, root, like, out)
        size = self.group.size
        if self.is_root:
            self.row = check_axis(self.source, "scatter")
            self.counts = check_counts(counts, size, self.source.shape[0])
            self.table = np.array(self.counts, np.int64)
            shape, dtype = (self.counts[self.root], *self.row), self.source.dtype
            self.target = self.make_target(self.source, shape, dtype, self.flat)
            self.sign(dtype, (ANY, *self.row))
        elif (known := self.placement.view_known(None, out)) is not None:
            self.sign(known.dtype, (ANY, *check_axis(known, "scatter")))
        else:
            self.sign()

    def pack(self, room: int) -> Bytes | None:
        if not self.is_root or self.description is not None:
            return None
        if self.table.nbytes + self.flat.nbytes <= room:
            # Says that the rows are there as well.
            self.length = 1
            return np.concatenate([self.table.view(np.uint8), self.flat.view(np.uint8)])
        return self.table.view(np.uint8) if self.table.nbytes <= self.group.inline_bytes else None

    def send(self) -> Steps:
        assert self.target is not None
        bounds = bounds_of(self.counts, prod(self.row))
        if self.payload is None:
            yield from algorithms.bcast(self.group.transport, self.table, self.root)
        if self.length:
            self.target.flat[...] = self.flat[bounds[self.root] : bounds[self.root + 1]]
        else:
            link = self.placement.link
            yield from algorithms.scatterv(link, self.flat, self.target.flat, bounds, self.root)

    def receive(self, payload: Bytes | None, dtype: DType, shape: tuple[int, ...]) -> Steps:
        group, row = self.group, shape[1:]
        table = np.empty(group.size, np.int64)
        if payload is None:
            yield from algorithms.bcast(group.transport, table, self.root)
        else:
            check_payload(self.root, len(payload[: table.nbytes]), table.nbytes)
            table[...] = payload[: table.nbytes].view(np.int64)
        counts = table.tolist()
        check_table(self.root, counts, sum(counts))
        check_size(self.root, [counts[group.rank]], prod(row) * dtype.itemsize)
        bounds = bounds_of(counts, prod(row))
        shape = (counts[group.rank], *row)
        self.target = DeferredResultBuffer(self.placement, self.kind, shape, dtype, self.out)
        into = self.target.flat
        if payload is not None and self.flag and self.placement.host:
            check_payload(self.root, len(payload) - table.nbytes, bounds[-1] * dtype.itemsize)
            rows = payload[table.nbytes :].view(dtype)
            into[...] = rows[bounds[group.rank] : bounds[group.rank + 1]]
        else:
            yield from algorithms.scatterv(self.placement.link, None, into, bounds, self.root)


# From all ranks to one, or to all ------------------------------------------------------------------


class Allgather(ArrayOperation):
    """See `Communicator.allgather`."""

    name, code = "allgather", 5
    header_independent = True

    def __init__(self, context: Context, x: Any, out: Any) -> None:
        super().__init__(context, x, out)
        self.signature = self.sign(None, None)
        self.target = self.make_target((self.group.size, *self.source.shape), out)
        self.copies += 1

    def steps(self, agreement: Agreement) -> Steps:
        assert self.target is not None
        flat, into, rank = self.flat, self.target.flat, self.group.rank
        bounds = bounds_of([flat.size] * self.group.size)
        if self.payload is not None:
            _join_inline(agreement, bounds, into)
        elif flat.size:
            into[bounds[rank] : bounds[rank + 1]] = flat
            yield from algorithms.allgatherv(self.placement.link, into, bounds)


class Gather(ArrayOperation):
    """See `Communicator.gather`."""

    name, code = "gather", 19
    header_independent = True

    def __init__(self, context: Context, x: Any, root: int, out: Any) -> None:
        self.root = check_root(root, context.group.size)
        super().__init__(context, x, out)
        self.signature = self.sign(None, self.root)
        if self.group.rank == self.root:
            shape = (self.group.size, *self.source.shape)
            self.target = self.make_target(shape, out, must_not_alias=True)
            self.copies += 1

    def steps(self, agreement: Agreement) -> Steps:
        into = None if self.target is None else self.target.flat
        bounds = bounds_of([self.flat.size] * self.group.size)
        if self.payload is None:
            yield from algorithms.gatherv(self.placement.link, self.flat, into, bounds, self.root)
        elif into is not None:
            _join_inline(agreement, bounds, into)


class Allgatherv(ArrayOperation):
    """See `Communicator.allgatherv`."""

    name, code = "allgatherv", 6
    same_length: ClassVar[str] = "allgather"

    def __init__(
        self, context: Context, x: Any, return_counts: bool, out: Any, root: int | None = None
    ) -> None:
        self.root = root
        super().__init__(context, x, out)
        self._out, self._return_counts = out, return_counts
        self.row = check_axis(self.source, self.same_length)
        self.signature = self.sign(None, root, (ANY, *self.row))
        self.length = self.source.shape[0]
        self.copies += 1

    def steps(self, agreement: Agreement) -> Steps:
        elements, dtype = prod(self.row), self.source.dtype
        self.counts = agreement.lengths(elements * dtype.itemsize)
        bounds = bounds_of(self.counts, elements)
        check_size(self.counts.index(max(self.counts)), bounds[-1:], dtype.itemsize)
        if max(self.counts) * elements * dtype.itemsize > self.placement.inline_bytes:
            nbytes = bounds[-1] * dtype.itemsize
            yield from take_together(self.group, self.name, nbytes, self._take_target)
            yield from self._move(bounds)
            return
        self._take_target()
        if self.target is not None:
            _join_inline(agreement, bounds, self.target.flat)

    def _take_target(self) -> None:
        if self.root in {None, self.group.rank}:
            shape, apart = (sum(self.counts), *self.row), self.root is not None
            self.target = DeferredResultBuffer(
                *(self.placement, self.source, shape, self.source.dtype, self._out, self.flat),
                must_not_alias=apart,
            )

    def _move(self, bounds: list[int]) -> Steps:
        into: Flat | None = None if self.target is None else self.target.flat
        link, rank = self.placement.link, self.group.rank
        if self.root is not None:
            yield from algorithms.gatherv(link, self.flat, into, bounds, self.root)
        elif into is not None:
            into[bounds[rank] : bounds[rank + 1]] = self.flat
            yield from algorithms.allgatherv(link, into, bounds)

    def result(self, agreement: Agreement) -> Any:
        if self.target is None:
            return None
        result = self.target.deliver()
        return (result, self.counts) if self._return_counts else result


class Gatherv(Allgatherv):
    """See `Communicator.gatherv`."""

    name, code = "gatherv", 20
    same_length = "gather"

    def __init__(self, context: Context, x: Any, root: int, return_counts: bool, out: Any) -> None:
        root = check_root(root, context.group.size)
        super().__init__(context, x, return_counts, out, root)


# From all ranks to all -----------------------------------------------------------------------------


class Alltoall(ArrayOperation):
    """See `Communicator.alltoall`."""

    name, code = "alltoall", 23
    header_independent = True

    def __init__(self, context: Context, x: Any, out: Any) -> None:
        super().__init__(context, x, out)
        check_rows(self.source, self.group.size)
        self.signature = self.sign(None, None)
        self.target = self.make_target(self.source.shape, out, must_not_alias=True)
        self.copies += 1

    def steps(self, agreement: Agreement) -> Steps:
        assert self.target is not None
        flat, into, rank = self.flat, self.target.flat, self.group.rank
        count = flat.size // self.group.size
        bounds = bounds_of([count] * self.group.size)
        if self.payload is None:
            link = self.placement.link
            yield from algorithms.alltoallv(link, flat, bounds, into, bounds, count)
            return
        for row, (start, end) in zip(self.rows(agreement), pairwise(bounds), strict=True):
            into[start:end] = row[bounds[rank] : bounds[rank + 1]]


class Alltoallv(ArrayOperation):
    """See `Communicator.alltoallv`. The counts travel with the header, the rows too if they fit."""

    name, code = "alltoallv", 24

    def __init__(
        self, context: Context, x: Any, counts: Any, return_counts: bool, out: Any
    ) -> None:
        super().__init__(context, x, out)
        self._out, self._return_counts = out, return_counts
        self.row = check_axis(self.source, "alltoall")
        self.length = self.source.shape[0]
        self.counts = check_counts(counts, self.group.size, self.length)
        self.table = np.array(self.counts, np.int64)
        self.signature = self.sign(None, None, (ANY, *self.row))
        self.copies += 1

    def pack(self, room: int) -> Bytes | None:
        if self.table.nbytes + self.flat.nbytes <= room:
            return np.concatenate([self.table.view(np.uint8), self.flat.view(np.uint8)])
        return self.table.view(np.uint8) if self.table.nbytes <= self.group.inline_bytes else None

    def steps(self, agreement: Agreement) -> Steps:
        group, elements, dtype = self.group, prod(self.row), self.flat.dtype
        tables, data = yield from self._tables(agreement, elements * dtype.itemsize)
        for rank, counts in enumerate(tables.tolist()):
            check_table(rank, counts, self.lengths[rank])
            check_size(rank, [counts[group.rank]], elements * dtype.itemsize)
        self.received = tables[:, group.rank].tolist()
        if data is None:
            nbytes = int(tables.sum()) * elements * dtype.itemsize
            yield from take_together(group, self.name, nbytes, self._take_target)
        else:
            self._take_target()
        assert self.target is not None
        flat, into, link = self.flat, self.target.flat, self.placement.link
        places = bounds_of(self.received, elements)
        if data is None:
            longest = int(tables.max()) * elements
            bounds = bounds_of(self.counts, elements)
            yield from algorithms.alltoallv(link, flat, bounds, into, places, longest)
            return
        for rank, (start, end) in enumerate(pairwise(places)):
            first = int(tables[rank, : group.rank].sum()) * elements
            into[start:end] = data[rank].view(dtype)[first : first + end - start]

    def _take_target(self) -> None:
        shape, source = (sum(self.received), *self.row), self.source
        self.target = DeferredResultBuffer(
            *(self.placement, source, shape, source.dtype, self._out, self.flat),
            must_not_alias=True,
        )

    def _tables(self, agreement: Agreement, row_bytes: int) -> Steps:
        """Return how many rows each rank sends to each, and their data if it came along."""
        group, width, lengths = self.group, self.table.nbytes, agreement.lengths()
        self.lengths = lengths
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

    def result(self, agreement: Agreement) -> Any:
        assert self.target is not None
        result = self.target.deliver()
        return (result, self.received) if self._return_counts else result
