"""Repeated messages over MPI."""

from __future__ import annotations

from mpi4py import MPI

from arraycomm._transports.base import Bytes
from arraycomm._transports.mpi.failures import translated
from arraycomm._transports.mpi.under_way import KEPT_ALIVE


class MpiRepeated:
    """See `Repeated`; `request` is that of the message begun last."""

    _request: MPI.Request

    def done(self) -> bool:
        try:
            return self._request.Test()
        except MPI.Exception as error:
            raise translated(error) from error

    def free(self, *, finished: bool) -> None:
        if not finished:
            KEPT_ALIVE.add(self)


class MpiSend(MpiRepeated):
    """A send, which is no persistent request: Open MPI finishes those later than others."""

    def __init__(self, comm: MPI.Intracomm, buffer: Bytes, dest: int, tag: int) -> None:
        self._start, self._arguments = comm.Isend, ([buffer, MPI.BYTE], dest, tag)

    def begin(self) -> bool:
        try:
            request = self._request = self._start(*self._arguments)
            return request.Test()
        except MPI.Exception as error:
            raise translated(error) from error


class MpiReceive(MpiRepeated):
    """A receive, whose request is made once and then started."""

    _request: MPI.Prequest

    def __init__(self, comm: MPI.Intracomm, buffer: Bytes, source: int, tag: int) -> None:
        self._request = comm.Recv_init([buffer, MPI.BYTE], source, tag)

    def begin(self) -> bool:
        try:
            self._request.Start()
            return self._request.Test()
        except MPI.Exception as error:
            raise translated(error) from error

    def free(self, *, finished: bool) -> None:
        super().free(finished=finished)
        if finished and not MPI.Is_finalized():
            self._request.Free()
