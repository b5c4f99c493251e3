"""Movements that are messages, and blocks of memory as MPI takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from arraycomm._transports.base import Blocks, Bytes
from arraycomm._transports.mpi.failures import translated
from arraycomm._transports.mpi.pieces import Lane
from arraycomm._transports.mpi.under_way import KEPT_ALIVE

Requests = list[MPI.Request]


class Messages:
    """Messages of one movement, whole or in pieces, and the buffers that they keep alive.

    Those in `later` are waited for after the others. In between `then` is called, which begins
    those that need what the others bring.
    """

    def __init__(self, *buffers: Bytes) -> None:
        self.requests, self.later = Requests(), Requests()
        self.lanes: list[Lane] = []
        self.then: Callable[[], None] | None = None
        self._buffers = buffers
        KEPT_ALIVE.add(self)

    def done(self) -> bool:
        try:
            while True:
                self.lanes = [lane for lane in self.lanes if not lane.done()]
                while self.requests:
                    if not self.requests[-1].Test():
                        return False
                    self.requests.pop()
                if self.lanes:
                    return False
                if self.then is None:
                    KEPT_ALIVE.discard(self)
                    return True
                then, self.then = self.then, None
                self.requests = self.later
                then()
        except MPI.Exception as error:
            raise translated(error) from error


def vector(blocks: Blocks) -> Any:
    """Return blocks as MPI takes them."""
    return [blocks.buffer, (blocks.counts, blocks.offsets), MPI.BYTE]
