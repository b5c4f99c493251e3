"""The collectives that move arrays and leave them as they are: see `operation.py`."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._arrays.exchange import exchange
from arraycomm._arrays.results import to_framework
from arraycomm._calls.arguments import check_root, check_rows
from arraycomm._calls.attempts import take_together
from arraycomm._calls.operation import NO_SHARE, ArrayOperation, Context, Operation, Share
from arraycomm._calls.placement import Destination, ResultBuffer, flatten
from arraycomm._calls.refusals import announced, check_taken, framework_code, like_root, wanted_kind
from arraycomm._dtypes import DType, Kind, check_reducible, kind_of
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.announced import check_payload, malformed
from arraycomm._protocol.details import Description, Nothing, description_of, exchange_details
from arraycomm._protocol.header import ANY, Signature
from arraycomm._reduce import algorithms
from arraycomm._reduce.blocks import bounds_of
from arraycomm._transports.base import Bytes, Flat, Steps


def join_inline(agreement: Agreement, bounds: list[int], target: Array) -> None:
    """Put what came with the headers, one part a rank, into one array."""
    for rank, (start, end) in enumerate(pairwise(bounds)):
        part = target[start:end]
        part[...] = agreement.payload(rank, part.nbytes).view(part.dtype)


# From one rank to all ---------------------------------------------------------------------------


class FromRoot(Operation):
    """The root's array goes to all ranks; the others need not know its dtype and shape."""

    # Whether every rank gets the whole array, and may pass one that is like it.
    whole: ClassVar[bool] = False
    # Whether parts may differ in length, which the shape in the header then leaves open.
    uneven: ClassVar[bool] = False
    description: Description | None = None
    source: BufferView
    flat: Flat
    # What the root announces beside its array.
    flag: int

    def __init__(self, context: Context, x: Any, root: int, like: Any, out: Any) -> None:
        self.root = check_root(root, context.group.size)
        self.is_root = context.group.rank == self.root
        if not (self.is_root or self.whole):
            x = None
        super().__init__(context, context.place(x, like, out))
        self.out = out
        if self.is_root:
            self._prepare_root(x)
        else:
            self._prepare_other(x, like, out)

    def _prepare_root(self, x: Any) -> None:
        if x is None:
            raise TypeError("x is None on the root; the root passes the array to send")
        self.source = self.kind = self.placement.view(x)
        dtype = self.source.dtype
        self.flat, self.copies = flatten(self.source)
        self.nbytes = self.flat.nbytes
        shape = self.part_of_root()
        self.target = self.make_target(dtype, shape)
        self._sign(dtype, shape)

    def _prepare_other(self, x: Any, like: Any, out: Any) -> None:
        self.kind = wanted_kind(x, like, out)
        self.word = announced(self.kind)
        known = self.placement.view_known(x, out)
        if known is None:
            self._sign()
        else:
            self.expect(known)
            self._sign(known.dtype, known.shape)

    def part_of_root(self) -> tuple[int, ...]:
        """Check what the root passes; return the shape of its own part."""
        raise NotImplementedError

    def expect(self, known: BufferView) -> None:
        """Prepare for a part that the caller knows."""
        self.target = self.make_target(known.dtype, known.shape)

    def _sign(self, dtype: DType | None = None, shape: tuple[int, ...] | None = None) -> None:
        if self.uneven and shape is not None:
            shape = (ANY, *shape[1:])
        self.signature = Signature(self.name, None, self.root, dtype, shape)
        if self.is_root and dtype is not None and shape is not None:
            self.description = Description.if_needed(dtype, shape)

    def make_target(
        self, dtype: DType, shape: tuple[int, ...], *, deferred: bool = False
    ) -> ResultBuffer:
        """Return where this rank's part goes."""
        source = self.flat if self.is_root else None
        to = Destination(self.kind, self.out, source, must_not_alias=not self.whole)
        return self.buffer_for(to, shape, dtype, deferred=deferred)

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
        dtype, shape = array
        self.kind = like_root(self.kind, self.flag, dtype)
        check_taken(self.name, lengths, rank, self.kind, dtype)
        if ANY in shape and not self.uneven:
            raise malformed(self.root, f"the shape {shape}")
        if not self.uneven and (some_unknown or self.target is None):
            size = prod(shape) * dtype.itemsize if some_unknown else 0
            yield from take_together(self.group, self.name, size, lambda: self._take(dtype, shape))
        yield from self.move(payload, dtype, shape)

    def _take(self, dtype: DType, shape: tuple[int, ...]) -> None:
        self.target = self.target or self.make_target(dtype, shape)

    def move(self, payload: Bytes | None, dtype: DType, shape: tuple[int, ...]) -> Steps:
        """Move the parts, of what the root shows; `payload` is what came with its header."""
        raise NotImplementedError


class Bcast(FromRoot):
    """See `Communicator.bcast`."""

    name, code = "bcast", 4
    whole = True

    def part_of_root(self) -> tuple[int, ...]:
        self.word = framework_code(self.source)
        return self.source.shape

    def share(self) -> Share:
        return Share(range(self.root, self.root + 1))

    def move(self, payload: Bytes | None, dtype: DType, shape: tuple[int, ...]) -> Steps:
        into = self.into
        if self.is_root and into is not self.flat:
            into[...] = self.flat
        if payload is None or not self.placement.host:
            yield from algorithms.bcast(self.placement.link, into, self.root)
        elif not self.is_root:
            check_payload(self.root, len(payload), into.nbytes)
            into.view(np.uint8)[...] = payload


class Scatter(FromRoot):
    """See `Communicator.scatter`."""

    name, code = "scatter", 21

    def part_of_root(self) -> tuple[int, ...]:
        return check_rows(self.source, self.group.size)

    def share(self) -> Share:
        return Share(range(self.root, self.root + 1), self.group.rank)

    def move(self, payload: Bytes | None, dtype: DType, shape: tuple[int, ...]) -> Steps:
        return self.scatter(payload, bounds_of([self.into.size] * self.group.size))

    def scatter(self, payload: Bytes | None, bounds: list[int]) -> Steps:
        """Give rank r its part, from element bounds[r]; `payload` has all parts, if they came."""
        into, part = self.into, slice(*bounds[self.group.rank : self.group.rank + 2])
        source = self.flat if self.is_root else None
        if payload is None or not self.placement.host:
            yield from algorithms.scatterv(self.placement.link, source, into, bounds, self.root)
        elif source is not None:
            into[...] = source[part]
        else:
            check_payload(self.root, len(payload), bounds[-1] * into.itemsize)
            into[...] = payload.view(into.dtype)[part]


# From all ranks to one, or to all ---------------------------------------------------------------


class Allgather(ArrayOperation):
    """See `Communicator.allgather`."""

    name, code = "allgather", 5
    header_independent = True

    def __init__(self, context: Context, x: Any, out: Any, root: int | None = None) -> None:
        super().__init__(context, x, out)
        self.root = root
        self.signature = self.sign(None, root)
        if root in {None, self.group.rank}:
            shape = (self.group.size, *self.source.shape)
            self.target = self.make_target(shape, out, must_not_alias=root is not None)
            self.copies += 1

    def share(self) -> Share:
        return NO_SHARE if self.target is None else Share(range(self.group.size))

    def steps(self, agreement: Agreement) -> Steps:
        flat, into = self.flat, self.into
        bounds = bounds_of([flat.size] * self.group.size)
        if self.payload is None:
            if flat.size:
                yield from algorithms.gatherv(self.placement.link, flat, into, bounds, self.root)
        elif into is not None:
            join_inline(agreement, bounds, into)


class Gather(Allgather):
    """See `Communicator.gather`."""

    name, code = "gather", 19

    def __init__(self, context: Context, x: Any, root: int, out: Any) -> None:
        super().__init__(context, x, out, check_root(root, context.group.size))


# From all ranks to all --------------------------------------------------------------------------


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

    def share(self) -> Share:
        return Share(range(self.group.size), self.group.rank)

    def steps(self, agreement: Agreement) -> Steps:
        flat, into, rank = self.flat, self.into, self.group.rank
        count = flat.size // self.group.size
        bounds = bounds_of([count] * self.group.size)
        if self.payload is None:
            link = self.placement.link
            yield from algorithms.alltoallv(link, flat, bounds, into, bounds, count)
            return
        for row, (start, end) in zip(self.rows(agreement), pairwise(bounds), strict=True):
            into[start:end] = row[bounds[rank] : bounds[rank + 1]]


class Maxloc(Allgather):
    """The largest elements of all ranks, and on which they are: see `Communicator.maxloc`."""

    name, code = "maxloc", 42
    op = "max"

    def __init__(self, context: Context, x: Any) -> None:
        super().__init__(context, x, None)
        check_reducible(self.source.dtype, self.op)

    def result(self, agreement: Agreement) -> Any:
        rows = exchange(super().result(agreement), "numpy").reshape(self.group.size, -1)
        # The comparisons of floats of 16 and 8 bits are not those of NumPy.
        wide = rows.astype(np.float32) if kind_of(rows.dtype) is Kind.NARROW else rows
        places = wide.argmax(0) if self.op == "max" else wide.argmin(0)
        found, ranks = np.take_along_axis(rows, places[np.newaxis], 0), places.astype(np.int32)
        shape, like = self.source.shape, self.source
        return to_framework(found.reshape(shape), like), to_framework(ranks.reshape(shape), like)


class Minloc(Maxloc):
    """See `Communicator.minloc`."""

    name, code = "minloc", 43
    op = "min"
