"""Movements between nodes, all ranks to each other, as messages; several may be under way.

A block that all ranks get goes once to each other node, whose ranks take turns in receiving for the
rest: the one that gets it passes it on there. Long messages go in pieces; see `pieces.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
from mpi4py import MPI

from arraycomm._transports.base import Blocks, Bytes, Handle
from arraycomm._transports.mpi.failures import translated
from arraycomm._transports.mpi.movement import Messages, Requests
from arraycomm._transports.mpi.pieces import Lane, Pieces
from arraycomm._transports.mpi.routes import Places

# The control channel has the tag 0. What two ranks send one another begins in the order of the
# movements. Messages that are passed on have tags of their own, one for each of the movements that
# may overlap, since others may begin meanwhile.
_TAG: Final = 1
_PASSED_ON: Final = 2
_OVERLAPPING: Final = 256


class DirectMessages:
    """The messages of one rank, over a communicator that only the control channel uses as well."""

    def __init__(self, comm: MPI.Intracomm, places: Places, pieces: Pieces) -> None:
        self._comm, self._rank, self._pieces, place = comm, comm.rank, pieces, places.place
        own = places.members[places.node[comm.rank]]
        self._neighbours = [rank for rank in own if rank != comm.rank]
        others = [ranks for ranks in places.members if ranks is not own]
        # To whom on each other node this rank's block goes, and who on this node gets which blocks.
        delegates = {ranks[place[comm.rank] % len(ranks)] for ranks in others}
        self._taken = {
            rank: sorted(r for ranks in others for r in ranks if own[place[r] % len(own)] == rank)
            for rank in own
        }
        # With whom on other nodes this rank exchanges such blocks: whether it gets one, and sends
        # its own.
        taken = self._taken[comm.rank]
        self._apart = [
            (rank, rank in taken, rank in delegates) for rank in sorted({*taken, *delegates})
        ]
        # The last lane of each other rank, as long as it is under way.
        self._lanes: WeakValueDictionary[int, Lane] = WeakValueDictionary()
        self._movements = 0

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        """Send block r to rank r; receive rank r's block in block r."""
        rank, size = self._rank, self._comm.size
        requests, lanes = Requests(), list[Lane]()
        for shift in range(1, size):
            peer = (rank + shift) % size
            self._exchange(requests, lanes, peer, recv.block(peer), send.block(peer))
        own = send.block(rank)
        if len(own):
            np.copyto(recv.block(rank), own)
        return Messages(requests, lanes, send.buffer, recv.buffer)

    def allgather(self, recv: Blocks) -> Handle:
        """Send this rank's own block of `recv` to all, and receive theirs, in place."""
        self._movements += 1
        passed, own = _PASSED_ON + self._movements % _OVERLAPPING, recv.block(self._rank)
        first, lanes, later = Requests(), list[Lane](), Requests()
        for peer, takes, sends in self._apart:
            into, block = recv.block(peer)[: None if takes else 0], own[: None if sends else 0]
            self._exchange(first, lanes, peer, into, block)
        for peer in self._neighbours:
            self._receive(later, recv.block(peer), peer, passed)
            for origin in self._taken[peer]:
                self._receive(later, recv.block(origin), peer, passed)
        for peer in self._neighbours:
            self._send(later, own, peer, passed)

        def then() -> Requests:
            for origin in self._taken[self._rank]:
                for peer in self._neighbours:
                    self._send(later, recv.block(origin), peer, passed)
            return later

        return Messages(first, lanes, recv.buffer, then=then)

    def _exchange(
        self, requests: Requests, lanes: list[Lane], peer: int, into: Bytes, block: Bytes
    ) -> None:
        """Begin the messages with a rank, whole or in pieces, after those of earlier movements."""
        near, before = peer in self._neighbours, self._lanes.get(peer)
        count = 1 if near else self._pieces.count_both(len(into), len(block))
        if before is not None and before.begun:
            before = None
        if count == 1 and before is None:
            self._receive(requests, into, peer, _TAG)
            self._send(requests, block, peer, _TAG)
            return
        lane = Lane(self._comm, (peer, _TAG), into, block, count, before)
        try:
            lane.begin()
        except MPI.Exception as error:
            raise translated(error) from error
        self._lanes[peer] = lane
        lanes.append(lane)

    def _receive(self, requests: Requests, into: Bytes, origin: int, tag: int) -> None:
        if len(into):
            requests.append(self._started(self._comm.Irecv, into, origin, tag))

    def _send(self, requests: Requests, block: Bytes, to: int, tag: int) -> None:
        if len(block):
            requests.append(self._started(self._comm.Isend, block, to, tag))

    def _started(
        self, start: Callable[..., MPI.Request], block: Bytes, peer: int, tag: int
    ) -> MPI.Request:
        try:
            return start([block, MPI.BYTE], peer, tag)
        except MPI.Exception as error:
            raise translated(error) from error
