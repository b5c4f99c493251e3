"""Pairs of messages over MPI, whose requests are made once and then started."""

from __future__ import annotations

from typing import ClassVar, Final

from mpi4py import MPI

from arraycomm._transports.base import Bytes
from arraycomm._transports.mpi_failures import translated
from arraycomm._transports.mpi_pieces import Pieces
from arraycomm._transports.pairs import ExchangePairs

# See `mpi_direct.py` and `mpi_relay.py` for the tags of other movements.
_TAG: Final = 3 << 10
# The most bytes of a message between nodes that take long ones whole.
_LONGEST: Final = 512 << 10


class _Persistent:
    """A message that can be started again when it is finished."""

    __slots__ = ("request",)

    def __init__(self, request: MPI.Prequest) -> None:
        self.request = request

    def done(self) -> bool:
        try:
            return self.request.Test()
        except MPI.Exception as error:
            raise translated(error) from error


class MpiPair:
    """See `Pair`; neither rank is this one."""

    # MPI may still write to the memory of messages that were given up.
    _given_up: ClassVar[list[MpiPair]] = []

    def __init__(
        self, comm: MPI.Intracomm, send: Bytes, dest: int, recv: Bytes, source: int, tag: int
    ) -> None:
        self.received = _Persistent(comm.Recv_init([recv, MPI.BYTE], source, tag))
        self.sent = _Persistent(comm.Send_init([send, MPI.BYTE], dest, tag))
        self._requests = self.received.request, self.sent.request

    @property
    def addresses(self) -> tuple[int, int]:
        received, sent = map(MPI._addressof, self._requests)
        return received, sent

    def begin(self) -> None:
        try:
            for request in self._requests:
                request.Start()
        except MPI.Exception as error:
            raise translated(error) from error

    def free(self) -> None:
        if MPI.Is_finalized():
            return
        try:
            finished = all(request.Test() for request in self._requests)
        except MPI.Exception:
            finished = False
        if finished:
            for request in self._requests:
                request.Free()
        else:
            self._given_up.append(self)


def make_exchange_pairs(comm: MPI.Intracomm, pieces: Pieces) -> ExchangePairs | None:
    """Return the messages of two ranks, over a communicator that has no others of this tag; None for more ranks."""
    if comm.size != 2:
        return None
    peer = 1 - comm.rank
    return ExchangePairs(
        min(pieces.most, _LONGEST),
        lambda send, recv: MpiPair(comm, send, peer, recv, peer, _TAG),
        lambda error: translated(MPI.Exception(error)),
    )
