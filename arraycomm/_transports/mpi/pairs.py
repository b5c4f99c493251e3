"""Pairs of messages over MPI, whose requests are made once and then started."""

from __future__ import annotations

from mpi4py import MPI

from arraycomm._transports.base import Bytes
from arraycomm._transports.mpi.failures import translated
from arraycomm._transports.mpi.under_way import KEPT_ALIVE


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

    def __init__(
        self, comm: MPI.Intracomm, send: Bytes, dest: int, recv: Bytes, source: int, tag: int
    ) -> None:
        self.received = _Persistent(comm.Recv_init([recv, MPI.BYTE], source, tag))
        self.sent = _Persistent(comm.Send_init([send, MPI.BYTE], dest, tag))
        self._requests = self.received.request, self.sent.request

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
            KEPT_ALIVE.add(self)
