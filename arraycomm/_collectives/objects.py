"""The collectives of Python objects, which travel as pickles: see `operation.py`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from arraycomm._calls.arguments import check_root
from arraycomm._calls.attempts import take_together
from arraycomm._calls.operation import Context, Operation
from arraycomm._calls.pickles import dumps, loads
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.announced import check_payload, check_size
from arraycomm._protocol.header import Signature
from arraycomm._reduce import algorithms
from arraycomm._reduce.blocks import bounds_of
from arraycomm._transports.base import Bytes, Steps

_NO_BYTES = np.empty(0, np.uint8)


def _bytes(count: int) -> Bytes:
    return np.empty(count, np.uint8)


class ObjectOperation(Operation):
    """An operation on one pickle a rank; `received` is each rank's, on a rank that gets them."""

    def __init__(self, context: Context, data: Bytes, root: int | None = None) -> None:
        super().__init__(context)
        self.data, self.root = data, root
        self.received: list[Bytes] = []
        self.signature = Signature(self.name, None, root)
        self.nbytes = self.word = len(data)

    def pack(self, room: int) -> Bytes | None:
        return self.data if len(self.data) <= room else None


class AllgatherObject(ObjectOperation):
    """See `Communicator.allgather_object`."""

    name, code = "allgather_object", 9

    def __init__(self, context: Context, obj: Any, root: int | None = None) -> None:
        super().__init__(context, dumps(obj), root)

    def steps(self, agreement: Agreement) -> Steps:
        group, lengths = self.group, agreement.lengths(1)
        check_payload(group.rank, lengths[group.rank], len(self.data))
        if max(lengths) <= group.inline_bytes:
            self.received = [agreement.payload(rank, n) for rank, n in enumerate(lengths)]
            return
        bounds, receives = bounds_of(lengths), self.receives
        if receives:
            check_size(group.rank, bounds[-1:])
        into = yield from take_together(
            group, self.name, bounds[-1], lambda: _bytes(bounds[-1]) if receives else None
        )
        yield from algorithms.gatherv(group.transport, self.data, into, bounds, self.root)
        if into is not None:
            self.received = [into[start:end] for start, end in pairwise(bounds)]

    def result(self, agreement: Agreement) -> list[Any] | None:
        if not self.receives:
            return None
        return [loads(rank, part) for rank, part in enumerate(self.received)]

    @property
    def receives(self) -> bool:
        """Whether this rank gets the objects."""
        return self.root in {None, self.group.rank}


class GatherObject(AllgatherObject):
    """See `Communicator.gather_object`."""

    name, code = "gather_object", 28

    def __init__(self, context: Context, obj: Any, root: int) -> None:
        super().__init__(context, obj, check_root(root, context.group.size))


class BcastObject(ObjectOperation):
    """See `Communicator.bcast_object`."""

    name, code = "bcast_object", 8

    def __init__(self, context: Context, obj: Any, root: int) -> None:
        root = check_root(root, context.group.size)
        super().__init__(context, dumps(obj) if context.group.rank == root else _NO_BYTES, root)

    def steps(self, agreement: Agreement) -> Steps:
        group = self.group
        assert self.root is not None
        length = agreement.lengths(1)[self.root]
        if length <= group.inline_bytes:
            self.received = [agreement.payload(self.root, length)]
            return
        check_size(self.root, [length])
        received = yield from take_together(
            group,
            self.name,
            length,
            lambda: self.data.copy() if group.rank == self.root else _bytes(length),
        )
        yield from algorithms.bcast(group.transport, received, self.root)
        self.received = [received]

    def result(self, agreement: Agreement) -> Any:
        assert self.root is not None
        return loads(self.root, self.received[0])
