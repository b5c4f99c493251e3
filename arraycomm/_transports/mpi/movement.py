"""Nonblocking MPI operations as handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from mpi4py import MPI

from arraycomm._transports.base import Blocks, Bytes, Handle
from arraycomm._transports.mpi.failures import translated
from arraycomm._transports.mpi.pieces import Lane

Requests = list[MPI.Request]
# What has memory that MPI reads or writes until it has finished, even if the caller has given it
# up: a message that comes too late must not be written into memory that has been used again.
KEPT_ALIVE: Final[set[Any]] = set()


class Movement:
    """A nonblocking MPI operation, and its arguments, of which it keeps the buffers alive."""

    def __init__(self, request: MPI.Request, arguments: tuple[Any, ...]) -> None:
        self._request, self._arguments = request, arguments
        KEPT_ALIVE.add(self)

    def done(self) -> bool:
        try:
            finished = self._request.Test()
        except MPI.Exception as error:
            raise translated(error) from error
        if finished:
            KEPT_ALIVE.discard(self)
        return finished


class Messages:
    """Messages of one movement, whole or in pieces, and the buffers that they keep alive.

    `then` begins the messages that need what the first ones bring.
    """

    def __init__(
        self,
        requests: Requests,
        lanes: list[Lane],
        *buffers: Bytes,
        then: Callable[[], Requests] | None = None,
    ) -> None:
        self._requests, self._lanes, self._buffers, self._then = requests, lanes, buffers, then
        KEPT_ALIVE.add(self)

    def done(self) -> bool:
        try:
            while True:
                self._lanes = [lane for lane in self._lanes if not lane.done()]
                while self._requests:
                    if not self._requests[-1].Test():
                        return False
                    self._requests.pop()
                if self._lanes:
                    return False
                if self._then is None:
                    KEPT_ALIVE.discard(self)
                    return True
                then, self._then = self._then, None
                self._requests = then()
        except MPI.Exception as error:
            raise translated(error) from error


def vector(blocks: Blocks) -> Any:
    """Return blocks as MPI takes them."""
    return [blocks.buffer, (blocks.counts, blocks.offsets), MPI.BYTE]


def begin(start: Callable[..., MPI.Request], *arguments: Any) -> Handle:
    """Begin an operation of MPI."""
    try:
        return Movement(start(*arguments), arguments)
    except MPI.Exception as error:
        raise translated(error) from error
