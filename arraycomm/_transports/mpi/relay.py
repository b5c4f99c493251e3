"""Broadcasts between nodes: each rank passes on what it gets, by the routes of `routes.py`.

Between nodes a part goes in pieces; see `pieces.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Final

from mpi4py import MPI

from arraycomm._transports.base import Bytes
from arraycomm._transports.mpi.failures import translated
from arraycomm._transports.mpi.movement import KEPT_ALIVE
from arraycomm._transports.mpi.pieces import AHEAD, Pieces
from arraycomm._transports.mpi.routes import Places, Route, parts_of, route

# Tags of broadcasts that may overlap; see `direct.py` for those of other movements.
_TAG: Final = 1 << 10
_OVERLAPPING: Final = 256


class Broadcasts:
    """The broadcasts of one rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        All ranks; no other messages have these tags.
    places : Places
        Which of them are on which node.
    pieces : Pieces
        How messages to other nodes are cut.
    """

    def __init__(self, comm: MPI.Intracomm, places: Places, pieces: Pieces) -> None:
        self._comm, self._rank, self._places, self._pieces = comm, comm.rank, places, pieces
        self._near = places.members[places.node[comm.rank]]
        self._begun = 0

    def bcast(self, buffer: Bytes, root: int) -> Relay:
        """Make every rank's buffer that of `root`."""
        self._begun += 1
        parts = parts_of(buffer, len(self._places.members))
        by = route(self._rank, root, self._places, len(parts))
        tag = _TAG + self._begun % _OVERLAPPING
        return Relay(self._comm, parts, by, self._near, self._pieces, tag)


class Relay:
    """One rank's part of a broadcast.

    Parameters
    ----------
    comm : MPI.Intracomm
        All ranks.
    parts : sequence of Bytes
        What the root sends, and where the others get it.
    by : Route
        The route of these parts.
    near : collection of int
        The ranks of this node.
    pieces : Pieces
        How messages to others are cut.
    tag : int
        A tag that no other movement under way has.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        parts: Sequence[Bytes],
        by: Route,
        near: Collection[int],
        pieces: Pieces,
        tag: int,
    ) -> None:
        self._comm, self._parts, self._to, self._tag = comm, parts, by.to, tag
        self._near, self._cut = near, pieces
        # The messages of each part that is still to come.
        self._receives: list[deque[MPI.Request]] = []
        # What is to be sent, and the messages of it that are under way.
        self._waiting: deque[tuple[Bytes, int]] = deque()
        self._sends: deque[MPI.Request] = deque()
        # How many parts are here.
        self._here = 0
        KEPT_ALIVE.add(self)
        try:
            if by.origin is None:
                for part in parts:
                    self._pass_on(part)
                self._here = len(parts)
                self._send()
            else:
                origin = by.origin
                self._receives = [
                    deque(
                        comm.Irecv([p, MPI.BYTE], origin, tag) for p in self._pieces(part, origin)
                    )
                    for part in parts
                ]
        except MPI.Exception as error:
            raise translated(error) from error

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
            self._sends.append(self._comm.Isend([piece, MPI.BYTE], peer, self._tag))

    def _pieces(self, part: Bytes, peer: int) -> list[Bytes]:
        return [part] if peer in self._near else self._cut.of(part)
