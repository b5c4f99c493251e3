"""Movements between nodes, all ranks to each other, as messages; several may be under way.

A block that all ranks get goes once to each other node, whose ranks take turns in receiving for the
rest: the one that gets it passes it on there. Long messages go in pieces; see `pieces.py`.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakValueDictionary

import numpy as np
from mpi4py import MPI

from arraycomm._transports.base import Blocks, Bytes, Handle
from arraycomm._transports.mpi.pieces import Lane, Messages, Pieces, Requests
from arraycomm._transports.mpi.routes import Places
from arraycomm._transports.mpi.under_way import start

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
        messages = Messages(send.buffer, recv.buffer)
        for shift in range(1, size):
            peer = (rank + shift) % size
            self._swap(messages, peer, recv.block(peer), send.block(peer))
        own = send.block(rank)
        if len(own):
            np.copyto(recv.block(rank), own)
        return messages

    def allgather(self, recv: Blocks) -> Handle:
        """Send this rank's own block of `recv` to all, and receive theirs, in place."""
        self._movements += 1
        passed, own = _PASSED_ON + self._movements % _OVERLAPPING, recv.block(self._rank)
        messages = Messages(recv.buffer)
        later = messages.later
        for peer, takes, sends in self._apart:
            into, block = recv.block(peer)[: None if takes else 0], own[: None if sends else 0]
            self._swap(messages, peer, into, block)
        for peer in self._neighbours:
            self._receive(later, recv.block(peer), peer, passed)
            for origin in self._taken[peer]:
                self._receive(later, recv.block(origin), peer, passed)
        for peer in self._neighbours:
            self._send(later, own, peer, passed)

        def then() -> None:
            for origin in self._taken[self._rank]:
                for peer in self._neighbours:
                    self._send(later, recv.block(origin), peer, passed)

        messages.then = then
        return messages

    def _swap(self, messages: Messages, peer: int, into: Bytes, block: Bytes) -> None:
        """Begin the messages with a rank, whole or in pieces, after those of earlier movements."""
        near, before = peer in self._neighbours, self._lanes.get(peer)
        count = 1 if near else self._pieces.count_both(len(into), len(block))
        if before is not None and before.begun:
            before = None
        if count == 1 and before is None:
            self._receive(messages.requests, into, peer, _TAG)
            self._send(messages.requests, block, peer, _TAG)
            return
        self._lanes[peer] = lane = Lane(self._comm, (peer, _TAG), into, block, count, before)
        messages.lanes.append(lane)
        lane.begin()

    def _receive(self, requests: Requests, into: Bytes, origin: int, tag: int) -> None:
        if len(into):
            start(requests, self._comm.Irecv, [into, MPI.BYTE], origin, tag)

    def _send(self, requests: Requests, block: Bytes, to: int, tag: int) -> None:
        if len(block):
            start(requests, self._comm.Isend, [block, MPI.BYTE], to, tag)
