"""Broadcasts between nodes: each rank passes on what it gets, by the routes of `routes.py`.

Between nodes a part goes in pieces; see `pieces.py`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from mpi4py import MPI

from arraycomm._transports.base import Bytes
from arraycomm._transports.mpi.failures import translated
from arraycomm._transports.mpi.pieces import AHEAD, Pieces
from arraycomm._transports.mpi.routes import Places, parts_of, route
from arraycomm._transports.mpi.under_way import KEPT_ALIVE, start

# Tags of broadcasts that may overlap; see `direct.py` for those of other movements.
_TAG: Final = 1 << 10
_OVERLAPPING: Final = 256


class Relay:
    """One rank's part of a broadcast, over a communicator in which nothing else has its tags.

    `number` is the same on all ranks; broadcasts that overlap have different ones.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        root: int,
        places: Places,
        buffer: Bytes,
        pieces: Pieces,
        number: int,
    ) -> None:
        self._comm, self._cut, self._tag = comm, pieces, _TAG + number % _OVERLAPPING
        self._near = places.members[places.node[comm.rank]]
        self._parts = parts_of(buffer, len(places.members))
        origin, self._to = route(comm.rank, root, places, len(self._parts))
        # The messages of each part that is still to come.
        self._receives: list[deque[MPI.Request]] = []
        # What is to be sent, and the messages of it that are under way.
        self._waiting: deque[tuple[Bytes, int]] = deque()
        self._sends: deque[MPI.Request] = deque()
        # How many parts are here.
        self._here = 0
        KEPT_ALIVE.add(self)
        if origin is None:
            for part in self._parts:
                self._pass_on(part)
            self._here = len(self._parts)
            self._send()
            return
        for part in self._parts:
            self._receives.append(deque())
            for piece in self._pieces(part, origin):
                start(self._receives[-1], comm.Irecv, [piece, MPI.BYTE], origin, self._tag)

    def done(self) -> bool:
        try:
            while self._here < len(self._parts):
                self._send()
                receives = self._receives[self._here]
                while receives:
                    if not receives[0].Test():
                        return False
                    receives.popleft()
                self._pass_on(self._parts[self._here])
                self._here += 1
            self._send()
            if self._sends:
                return False
        except MPI.Exception as error:
            raise translated(error) from error
        KEPT_ALIVE.discard(self)
        return True

    def _pass_on(self, part: Bytes) -> None:
        for peer in self._to:
            self._waiting.extend((piece, peer) for piece in self._pieces(part, peer))

    def _send(self) -> None:
        """Send what can be sent: of pieces only a few are under way."""
        while self._sends and self._sends[0].Test():
            self._sends.popleft()
        while self._waiting and len(self._sends) < AHEAD * len(self._to):
            piece, peer = self._waiting.popleft()
            start(self._sends, self._comm.Isend, [piece, MPI.BYTE], peer, self._tag)

    def _pieces(self, part: Bytes, peer: int) -> list[Bytes]:
        return [part] if peer in self._near else self._cut.of(part)
