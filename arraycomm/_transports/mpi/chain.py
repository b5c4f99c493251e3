"""The chain of nodes over MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from mpi4py import MPI

from arraycomm._transports.base import Bytes, Handle, NodeChain, is_chain
from arraycomm._transports.control import SharedControl
from arraycomm._transports.mpi.pieces import Messages, Pieces
from arraycomm._transports.mpi.routes import Places
from arraycomm._transports.mpi.under_way import on_all, shared_memory, start

# See `direct.py` and `routes.py` for the tags of other movements.
_TAG: Final = 1 << 11


class MpiChain(NodeChain):
    """One rank's place in the chain; `comm` has all ranks, and no other messages of this tag."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        members: Sequence[Sequence[int]],
        control: SharedControl,
        pieces: Pieces,
    ) -> None:
        super().__init__(comm.rank, members, control)
        self._comm, self._pieces = comm, pieces

    def send(self, buffer: Bytes, peer: int) -> Handle:
        return self._begin(self._comm.Isend, buffer, peer)

    def recv(self, buffer: Bytes, peer: int) -> Handle:
        return self._begin(self._comm.Irecv, buffer, peer)

    def _begin(self, begin: Callable[..., MPI.Request], buffer: Bytes, peer: int) -> Handle:
        messages = Messages(buffer)
        for piece in self._pieces.of(buffer):
            start(messages.requests, begin, [piece, MPI.BYTE], peer, _TAG)
        return messages


def make_chain(
    comm: MPI.Intracomm, between: MPI.Intracomm, places: Places, pieces: Pieces
) -> MpiChain | None:
    """Return the chain of all ranks' nodes, with messages over `between`; collective, may block.

    None, on every rank, if nodes make no chain or the ranks of one cannot share memory.
    """
    if not is_chain(places.members):
        return None
    here = comm.Split(places.node[comm.rank], comm.rank)
    assert isinstance(here, MPI.Intracomm)
    rank, size = here.rank, here.size
    memory = shared_memory(here, SharedControl.nbytes(size))
    here.Free()
    if not on_all(comm, memory is not None) or memory is None:
        return None
    return MpiChain(between, places.members, SharedControl(rank, size, memory), pieces)
