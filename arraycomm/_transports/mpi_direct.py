"""Movements between nodes as messages of their own, all ranks to each other; several may be under way.

A block that all ranks get goes once to each other node, whose ranks take turns in receiving for the rest: the
one that gets it passes it on there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from mpi4py import MPI

from arraycomm._transports.base import Blocks, Bytes, Handle
from arraycomm._transports.mpi_failures import translated
from arraycomm._transports.routes import Places

# The control channel has the tag 0. Messages that are passed on have tags of their own, one for each of
# the movements that may overlap, since others may begin meanwhile.
_TAG: Final = 1
_PASSED_ON: Final = 2
_OVERLAPPING: Final = 256
# The most ranks whose messages are made once, and how long the native part looks for such messages.
_PREPARED_RANKS: Final = 8
_NANOSECONDS: Final = 3_000_000

Requests = list[MPI.Request]


class _Messages:
    """Messages of one movement, and the buffers that they keep alive.

    `then` begins the messages that need what the first ones bring.
    """

    # MPI accesses the buffers until a message is finished, even if the caller has given it up.
    under_way: ClassVar[set[_Messages]] = set()

    def __init__(
        self, requests: Requests, *buffers: Bytes, then: Callable[[], Requests] | None = None
    ) -> None:
        self._requests, self._buffers, self._then = requests, buffers, then
        self.under_way.add(self)

    def done(self) -> bool:
        try:
            while True:
                while self._requests:
                    if not self._requests[-1].Test():
                        return False
                    self._requests.pop()
                if self._then is None:
                    self.under_way.discard(self)
                    return True
                then, self._then = self._then, None
                self._requests = then()
        except MPI.Exception as error:
            raise translated(error) from error


class _Persistent(NamedTuple):
    """Persistent messages, and where the native part finds them."""

    requests: list[MPI.Prequest]
    addresses: list[int]


class DirectSlices:
    """The messages of slices between ranks each alone on its node, as those of `DirectMessages`."""

    def __init__(
        self, comm: MPI.Intracomm, send: Blocks, come: Blocks, result: Blocks, native: Any
    ) -> None:
        rank, self._native = comm.rank, native
        own = Blocks(
            result.buffer, [result.counts[rank]] * comm.size, [result.offsets[rank]] * comm.size
        )
        self._kept = come.buffer
        self._scatter = self._made(comm, send, come)
        self._gather = self._made(comm, own, result)

    @staticmethod
    def _made(comm: MPI.Intracomm, send: Blocks, recv: Blocks) -> _Persistent:
        made = []
        for shift in range(1, comm.size):
            to, origin = (comm.rank + shift) % comm.size, (comm.rank - shift) % comm.size
            for make, blocks, peer in ((comm.Recv_init, recv, origin), (comm.Send_init, send, to)):
                if nbytes := blocks.counts[peer]:
                    memory = MPI.buffer.fromaddress(_address(blocks.block(peer)), nbytes)
                    made.append(make([memory, MPI.BYTE], peer, _TAG))
        return _Persistent(made, [MPI._addressof(request) for request in made])

    def scatter(self, *arrays: Bytes) -> Handle:
        """See `PreparedSlices`."""
        return self._begun(self._scatter, arrays)

    def gather(self, *arrays: Bytes) -> Handle:
        """See `PreparedSlices`."""
        return self._begun(self._gather, arrays)

    def _begun(self, messages: _Persistent, arrays: tuple[Bytes, ...]) -> Handle:
        done, error = False, 0
        try:
            if self._native is None:
                MPI.Prequest.Startall(messages.requests)
            else:
                done, error = self._native.move(messages.addresses, _NANOSECONDS)
            if error:
                raise MPI.Exception(error)
        except MPI.Exception as raised:
            raise translated(raised) from raised
        return _Messages([] if done else [*messages.requests], self._kept, *arrays)

    def free(self) -> None:
        """See `PreparedSlices`."""
        for request in (*self._scatter.requests, *self._gather.requests):
            request.Free()


def _address(memory: Bytes) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address


class DirectMessages:
    """The messages of one rank, over a communicator in which only the control channel has others.

    Parameters
    ----------
    comm : MPI.Intracomm
        All ranks.
    places : Places
        Which of them are on which node.
    """

    def __init__(self, comm: MPI.Intracomm, places: Places) -> None:
        self._comm, self._rank, place = comm, comm.rank, places.place
        own = places.members[places.node[comm.rank]]
        self._neighbours = [rank for rank in own if rank != comm.rank]
        self._passes_on = len(places.members) < comm.size
        others = [ranks for ranks in places.members if ranks is not own]
        # To whom on each other node this rank's block goes, and who on this node gets which blocks.
        self._delegates = [ranks[place[comm.rank] % len(ranks)] for ranks in others]
        self._taken = {
            rank: sorted(r for ranks in others for r in ranks if own[place[r] % len(own)] == rank)
            for rank in own
        }
        self._movements = 0

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        """Send block r to rank r; receive rank r's block in block r."""
        rank, size, requests = self._rank, self._comm.size, Requests()
        for shift in range(1, size):
            origin, to = (rank - shift) % size, (rank + shift) % size
            self._receive(requests, recv.block(origin), origin, _TAG)
            self._send(requests, send.block(to), to, _TAG)
        own = send.block(rank)
        if len(own):
            np.copyto(recv.block(rank), own)
        return _Messages(requests, send.buffer, recv.buffer)

    def allgather(self, recv: Blocks) -> Handle:
        """Send this rank's own block of `recv` to all, and receive theirs, in place."""
        self._movements += 1
        passed = _PASSED_ON + self._movements % _OVERLAPPING
        first, later = Requests(), Requests()
        taken = self._taken[self._rank]
        for origin in taken:
            self._receive(first, recv.block(origin), origin, _TAG)
        for peer in self._neighbours:
            self._receive(later, recv.block(peer), peer, passed)
            for origin in self._taken[peer]:
                self._receive(later, recv.block(origin), peer, passed)
        own = recv.block(self._rank)
        for delegate in self._delegates:
            self._send(first, own, delegate, _TAG)
        for peer in self._neighbours:
            self._send(later, own, peer, passed)

        def then() -> Requests:
            for origin in taken:
                for peer in self._neighbours:
                    self._send(later, recv.block(origin), peer, passed)
            return later

        return _Messages(first, recv.buffer, then=then)

    def prepare(
        self, send: Blocks, come: Blocks, result: Blocks, native: Any
    ) -> DirectSlices | None:
        """Make the messages of slices once; None for many ranks, or if blocks would be passed on.

        `native` looks for them in the native part, if it is not None.
        """
        if self._passes_on or self._comm.size > _PREPARED_RANKS:
            return None
        return DirectSlices(self._comm, send, come, result, native)

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
