"""The routes of broadcasts between nodes: each node gets one copy, in parts passed on early.

One rank of each node gets a part from another node, and sends it to further nodes and to ranks of
its own. The nodes, and the ranks of each, are a chain if there are enough parts to fill it, and
otherwise a binary tree. In a chain each sends every part once, but the last one waits for as many
parts as there are others before it. Between nodes a part goes in pieces; see `pieces.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from mpi4py import MPI

from arraycomm._transports.base import Bytes, Flat
from arraycomm._transports.mpi.pieces import AHEAD, Pieces
from arraycomm._transports.mpi.under_way import KEPT_ALIVE, start, translated
from arraycomm._transports.undivided import Undivided

# A part has at least this many bytes. There are at most this many for each level of a binary tree
# of the nodes: with twice as many on four nodes, whose ranks shared two cores, the whole took half
# as long again.
_LEAST: Final = 512 << 10
_MOST: Final = 4

# Tags of broadcasts that may overlap; see `direct.py` for those of other movements.
_TAG: Final = 1 << 10
_OVERLAPPING: Final = 256

T = TypeVar("T")


class Places:
    """Which ranks are on which node; `nodes` has for each rank a number of its node."""

    def __init__(self, nodes: Sequence[int]) -> None:
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        # The ranks of each node.
        self.members: list[list[int]] = [[] for _ in numbers]
        # For each rank, where its node is among these, and where it is in its node.
        self.node = [numbers[node] for node in nodes]
        self.place: list[int] = []
        for rank, number in enumerate(self.node):
            self.place.append(len(self.members[number]))
            self.members[number].append(rank)


class Route(NamedTuple):
    """From whom a rank gets each part, None for the root, and to whom it passes it on."""

    origin: int | None
    to: list[int]


def parts_of(buffer: Flat, nodes: int) -> list[Flat]:
    """Cut what goes to this many nodes into parts."""
    most = _MOST * max((nodes - 1).bit_length(), 1)
    step = max(_LEAST, -(-len(buffer) // most))
    return [buffer[start : start + step] for start in range(0, len(buffer), step)]


def route(rank: int, root: int, places: Places, parts: int) -> Route:
    """Return the route of this many parts over a rank."""
    own, at_root = places.node[rank], places.node[root]
    ranks = _turned(places.members[own], places.place[root] if own == at_root else 0)
    within = _along(ranks, ranks.index(rank), parts)
    if rank != ranks[0]:
        return within
    firsts = [root, *(others[0] for others in _turned(places.members, at_root)[1:])]
    between = _along(firsts, firsts.index(rank), parts)
    # Other nodes first: their links are slower.
    return Route(between.origin, between.to + within.to)


def _turned(items: Sequence[T], first: int) -> list[T]:
    return [*items[first:], *items[:first]]


def _along(ranks: Sequence[int], place: int, parts: int) -> Route:
    """Return the route over one of these ranks, of which the first one has all parts."""
    width = 1 if len(ranks) < parts + len(ranks).bit_length() else 2
    origin = ranks[(place - 1) // width] if place else None
    return Route(origin, list(ranks[width * place + 1 :][:width]))


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
        self._here, self._moving = 0, Undivided()
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
        with self._moving:
            return self._move()

    def _move(self) -> bool:
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
