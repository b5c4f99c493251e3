"""The collectives of Python objects, which travel as pickles, as calls: see `_calls.py`."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from arraycomm._collectives import algorithms
from arraycomm._collectives.operation import (
    Call,
    bounds_of,
    check_root,
    deliver,
    lengths_of,
    payload_of,
)
from arraycomm._collectives.pickling import dumps, loads
from arraycomm._protocol.header import Agreement, Signature, Steps

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator


def allgather_object(comm: Communicator, obj: Any, operation: str = "allgather_object") -> Call:
    """See `Communicator.allgather_object`."""
    data = dumps(obj)

    def finish(agreement: Agreement) -> Steps:
        lengths = lengths_of(agreement, comm.size)
        if max(lengths) <= comm._inline:
            parts = [agreement.payload(rank, n) for rank, n in enumerate(lengths)]
            return deliver(lambda: [loads(part) for part in parts])
        bounds = bounds_of(lengths)
        everything = np.empty(bounds[-1], np.uint8)
        everything[bounds[comm.rank] : bounds[comm.rank + 1]] = data
        yield from algorithms.allgatherv(comm._link, everything, bounds)
        return deliver(lambda: [loads(everything[start:end]) for start, end in pairwise(bounds)])

    return Call(
        Signature(operation),
        finish,
        payload_of(data, len(data) <= comm._inline),
        len(data),
        nbytes=len(data),
    )


def gather_object(comm: Communicator, obj: Any, root: int) -> Call:
    """See `Communicator.gather_object`."""
    root = check_root(comm, root, "gather_object")
    data = dumps(obj)

    def finish(agreement: Agreement) -> Steps:
        lengths = lengths_of(agreement, comm.size)
        bounds = bounds_of(lengths)
        parts: list[np.ndarray[Any, Any]] = []
        if max(lengths) <= comm._inline:
            parts = [agreement.payload(rank, n) for rank, n in enumerate(lengths)]
        else:
            everything = np.empty(bounds[-1] if comm.rank == root else 0, np.uint8)
            into = everything if comm.rank == root else None
            yield from algorithms.gatherv(comm._link, data, into, bounds, root)
            parts = [everything[start:end] for start, end in pairwise(bounds)]
        if comm.rank != root:
            return None
        return deliver(lambda: [loads(part) for part in parts])

    return Call(
        Signature("gather_object", None, root),
        finish,
        payload_of(data, len(data) <= comm._inline),
        len(data),
        nbytes=len(data),
    )


def bcast_object(comm: Communicator, obj: Any, root: int) -> Call:
    """See `Communicator.bcast_object`."""
    root = check_root(comm, root, "bcast_object")
    data = np.empty(0, np.uint8)
    if comm.rank == root:
        data = dumps(obj)

    def finish(agreement: Agreement) -> Steps:
        length = lengths_of(agreement, comm.size)[root]
        if length <= comm._inline:
            return deliver(loads, agreement.payload(root, length))
        received = data.copy() if comm.rank == root else np.empty(length, np.uint8)
        yield from algorithms.bcast(comm._link, received, root)
        return deliver(loads, received)

    return Call(
        Signature("bcast_object", None, root),
        finish,
        payload_of(data, len(data) <= comm._inline),
        len(data),
        nbytes=len(data),
    )
