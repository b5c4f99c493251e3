"""A nonblocking MPI operation as a handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from mpi4py import MPI

from arraycomm._transports.base import Blocks, Handle
from arraycomm._transports.mpi_failures import translated


class Movement:
    """A nonblocking MPI operation, and its arguments, of which it keeps the buffers alive."""

    # MPI accesses the buffers until an operation is finished, even if the caller has given it up: a
    # message that comes too late must not be written into memory that has been used again.
    under_way: ClassVar[set[Movement]] = set()

    def __init__(self, request: MPI.Request, arguments: tuple[Any, ...]) -> None:
        self._request, self._arguments = request, arguments
        self.under_way.add(self)

    def done(self) -> bool:
        try:
            finished = self._request.Test()
        except MPI.Exception as error:
            raise translated(error) from error
        if finished:
            self.under_way.discard(self)
        return finished


def vector(blocks: Blocks) -> Any:
    """Return blocks as MPI takes them."""
    return [blocks.buffer, (blocks.counts, blocks.offsets), MPI.BYTE]


def begin(start: Callable[..., MPI.Request], *arguments: Any) -> Handle:
    """Begin an operation of MPI."""
    try:
        return Movement(start(*arguments), arguments)
    except MPI.Exception as error:
        raise translated(error) from error
