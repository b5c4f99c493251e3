"""Broadcasts between nodes: each rank passes on the pieces that come to it, by the routes of `routes.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from mpi4py import MPI

from arraycomm._transports.base import Bytes
from arraycomm._transports.mpi_failures import translated
from arraycomm._transports.routes import Places, Route, pieces_of, route

# Tags of broadcasts that may overlap; see `mpi_direct.py` for those of other movements.
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
    """

    def __init__(self, comm: MPI.Intracomm, places: Places) -> None:
        self._comm, self._rank, self._places = comm, comm.rank, places
        self._begun = 0

    def bcast(self, buffer: Bytes, root: int) -> Relay:
        """Make every rank's buffer that of `root`."""
        self._begun += 1
        pieces = pieces_of(buffer, len(self._places.members))
        by = route(self._rank, root, self._places, len(pieces))
        return Relay(self._comm, pieces, by, _TAG + self._begun % _OVERLAPPING)


class Relay:
    """One rank's part of a broadcast.

    Parameters
    ----------
    comm : MPI.Intracomm
        All ranks.
    pieces : sequence of Bytes
        What the root sends, and where the others get it.
    by : Route
        The route of its pieces.
    tag : int
        A tag that no other movement under way has.
    """

    # MPI accesses the buffers until a message is finished, even if the caller has given it up.
    under_way: ClassVar[set[Relay]] = set()

    def __init__(self, comm: MPI.Intracomm, pieces: Sequence[Bytes], by: Route, tag: int) -> None:
        self._comm, self._pieces, self._to, self._tag = comm, pieces, by.to, tag
        self._receives: list[MPI.Request] = []
        self._sends: list[MPI.Request] = []
        # How many pieces are here.
        self._here = 0
        self.under_way.add(self)
        try:
            if by.origin is None:
                for piece in pieces:
                    self._pass_on(piece)
                self._here = len(pieces)
            else:
                origin = by.origin
                self._receives = [comm.Irecv([p, MPI.BYTE], origin, tag) for p in pieces]
        except MPI.Exception as error:
            raise translated(error) from error

    def done(self) -> bool:
        try:
            while self._here < len(self._pieces):
                if not self._receives[self._here].Test():
                    return False
                self._pass_on(self._pieces[self._here])
                self._here += 1
            if not MPI.Request.Testall(self._sends):
                return False
        except MPI.Exception as error:
            raise translated(error) from error
        self.under_way.discard(self)
        return True

    def _pass_on(self, piece: Bytes) -> None:
        for peer in self._to:
            self._sends.append(self._comm.Isend([piece, MPI.BYTE], peer, self._tag))
