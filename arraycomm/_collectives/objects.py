"""The collectives of Python objects, which travel as pickles: see `operation.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from arraycomm._calls.arguments import check_root
from arraycomm._calls.attempts import take_together
from arraycomm._calls.operation import NO_SHARE, Context, Operation, Share
from arraycomm._calls.pickles import Pickled, dumps, loads
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.announced import check_payload, check_size
from arraycomm._protocol.header import Signature
from arraycomm._reduce import algorithms
from arraycomm._reduce.blocks import bounds_of
from arraycomm._transports.base import Bytes, Steps

_NO_BYTES = np.empty(0, np.uint8)


def _bytes(count: int) -> Bytes:
    return np.empty(count, np.uint8)


def _data_of(obj: Any) -> Bytes:
    return obj.data() if type(obj) is Pickled else dumps(obj)


class ObjectOperation(Operation):
    """An operation on one pickle a rank; `received` is each rank's, on a rank that gets them."""

    # Whether this rank's object is sent.
    sends = True

    def __init__(self, context: Context, data: Bytes, root: int | None = None) -> None:
        super().__init__(context)
        self.data, self.root = data, root
        self.received: list[Bytes] = []
        self.signature = Signature(self.name, None, root)
        self.nbytes = self.word = len(data)

    def pack(self, room: int) -> Bytes | None:
        return self.data if len(self.data) <= room else None

    @staticmethod
    def loaded(root: int | None, received: Sequence[Bytes | bytes]) -> Any:
        """Return what the call returns on a rank that has received these pickles."""
        raise NotImplementedError

    def result(self, agreement: Agreement) -> Any:
        return self.loaded(self.root, self.received)


class AllgatherObject(ObjectOperation):
    """See `Communicator.allgather_object`."""

    name, code = "allgather_object", 9

    def __init__(self, context: Context, obj: Any, root: int | None = None) -> None:
        super().__init__(context, _data_of(obj), root)

    def steps(self, agreement: Agreement) -> Steps:
        group, lengths = self.group, agreement.lengths(1)
        check_payload(group.rank, lengths[group.rank], len(self.data))
        if max(lengths) <= group.inline_bytes:
            ranks = self.share().ranks
            self.received = [agreement.payload(rank, lengths[rank]) for rank in ranks]
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

    def share(self) -> Share:
        return Share(range(self.group.size)) if self.receives else NO_SHARE

    @staticmethod
    def loaded(root: int | None, received: Sequence[Bytes | bytes]) -> list[Any] | None:
        parts = [loads(rank, part) for rank, part in enumerate(received)]
        return parts or None

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
        self.sends = context.group.rank == root
        super().__init__(context, _data_of(obj) if self.sends else _NO_BYTES, root)

    def share(self) -> Share:
        assert self.root is not None
        return Share(range(self.root, self.root + 1))

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

    @staticmethod
    def loaded(root: int | None, received: Sequence[Bytes | bytes]) -> Any:
        assert root is not None
        return loads(root, received[0])
