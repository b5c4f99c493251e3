"""A broadcast of a few ranks on several nodes: each node gets one copy, in pieces that go on while the next ones come.

The first rank on each node that gets a piece sends it to other nodes and to ranks of its own. Many pieces go from one
to the next, each way; few pieces go by a binomial tree, since a rank far from the root would wait for all before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

from mpi4py import MPI

from arraycomm._transports.base import Bytes
from arraycomm._transports.mpi_control import translated

# A piece has at least so many bytes, and there are at most so many pieces: with 64 the whole took twice as long.
_LEAST: Final = 1 << 20
_MOST: Final = 4
# On more nodes, pieces would have too far to go, and the MPI broadcasts itself.
NODES: Final = _MOST


class Route(NamedTuple):
    """From whom a rank gets each piece, None for the root, and to whom it passes it on."""

    origin: int | None
    to: list[int]


def pieces_of(buffer: Bytes) -> list[Bytes]:
    """Cut what is sent into pieces."""
    step = max(_LEAST, -(-len(buffer) // _MOST))
    return [buffer[start : start + step] for start in range(0, len(buffer), step)]


def route(rank: int, root: int, nodes: Sequence[int], pieces: int) -> Route:
    """Return the route of so many pieces over a rank; `nodes` has a number for the node of each rank."""
    members: dict[int, list[int]] = {nodes[root]: [root]}
    for shift in range(1, len(nodes)):
        member = (root + shift) % len(nodes)
        members.setdefault(nodes[member], []).append(member)
    own = members[nodes[rank]]
    firsts = [ranks[0] for ranks in members.values()]
    origin, to = None, _after(own, own.index(rank), pieces)
    if rank == own[0]:
        place = firsts.index(rank)
        # Other nodes first: their links are slower.
        to = _after(firsts, place, pieces) + to
        if place:
            origin = firsts[_before(len(firsts), place, pieces)]
    else:
        origin = own[_before(len(own), own.index(rank), pieces)]
    return Route(origin, to)


def _after(ranks: Sequence[int], place: int, pieces: int) -> list[int]:
    if pieces >= len(ranks):
        return list(ranks[place + 1 : place + 2])
    steps = (1 << bit for bit in range(place.bit_length(), len(ranks).bit_length()))
    return [ranks[place + step] for step in steps if place + step < len(ranks)]


def _before(count: int, place: int, pieces: int) -> int:
    return place - 1 if pieces >= count else place - (1 << place.bit_length() - 1)


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
