"""Ranks as MPI processes, through mpi4py.

On one node the control channel is a file that all ranks map; between nodes it is a persistent
allgather. Large movements are nonblocking collectives of bytes: MPI sees no dtype, and reduces
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import ClassVar, cast

import numpy as np
from mpi4py import MPI

from arraycomm._errors import TransportError
from arraycomm._transports.base import Blocks, Bytes, Handle, Transport
from arraycomm._transports.control import ControlChannel, SharedControl
from arraycomm._transports.mailbox import Mailbox
from arraycomm._transports.mpi_control import MpiControl, translated
from arraycomm._transports.mpi_probe import MessageProbe
from arraycomm._transports.shared_files import close_file, make_file, need_names, open_file

_SPINS = 64
# The longest path of a file.
_PATH = 4096


@cache
def survives_failures() -> bool:
    """Tell whether MPI was started so that the other processes survive the death of one."""
    enabled = os.environ.get("OMPI_MCA_mpi_ft_enable", "")  # noqa: SIM112 - Open MPI's own name
    return enabled.lower() in ("1", "true", "ulfm")


class _Movement:
    """A nonblocking MPI operation, and the buffers that it keeps alive."""

    # MPI accesses the buffers until an operation is finished, even if the caller has given it up: a
    # message that comes too late must not be written into memory that has been used again.
    under_way: ClassVar[set[_Movement]] = set()

    def __init__(self, request: MPI.Request, *buffers: Bytes | None) -> None:
        self._request = request
        self._buffers = buffers
        self.under_way.add(self)

    def done(self) -> bool:
        try:
            finished = self._request.Test()
        except MPI.Exception as error:
            raise translated(error) from error
        if finished:
            self.under_way.discard(self)
        return finished


class _Finished:
    def done(self) -> bool:
        return True


class MPITransport(Transport):
    """One rank of an MPI communicator that belongs to this transport alone."""

    name = "mpi"
    spins = _SPINS

    def __init__(
        self, comm: MPI.Intracomm, *, share: bool = True, nodes: Sequence[int] | None = None
    ) -> None:
        self.mpi_comm: MPI.Intracomm = comm
        self.rank, self.size = comm.rank, comm.size
        self.threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.outlives = survives_failures()
        self._share = share
        # Messages of this rank to itself: MPI may finish a send only when it is received.
        self._own = Mailbox()
        self._probe = MessageProbe(comm, self._own)
        self._nodes = _find_nodes(comm) if nodes is None else nodes
        own = self._nodes[self.rank]
        self.local_rank = self._nodes[: self.rank].count(own)
        self.local_size = self._nodes.count(own)
        memory = None
        if share and self.local_size == self.size:
            memory = _shared_memory(comm, SharedControl.nbytes(self.size))
        self.control: ControlChannel = (
            MpiControl(comm) if memory is None else SharedControl(self.rank, self.size, memory)
        )

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        return self._start(
            lambda: self.mpi_comm.Ialltoallv(
                [send.buffer, (send.counts, send.offsets), MPI.BYTE],
                [recv.buffer, (recv.counts, recv.offsets), MPI.BYTE],
            ),
            send.buffer,
            recv.buffer,
        )

    def allgather(self, recv: Blocks) -> Handle:
        return self._start(
            lambda: self.mpi_comm.Iallgatherv(
                MPI.IN_PLACE, [recv.buffer, (recv.counts, recv.offsets), MPI.BYTE]
            ),
            recv.buffer,
        )

    def gather(self, send: Bytes, recv: Blocks | None, root: int) -> Handle:
        into = recv and [recv.buffer, (recv.counts, recv.offsets), MPI.BYTE]
        return self._start(
            lambda: self.mpi_comm.Igatherv([send, MPI.BYTE], into, root),
            send,
            recv and recv.buffer,
        )

    def scatter(self, send: Blocks | None, recv: Bytes, root: int) -> Handle:
        blocks = send and [send.buffer, (send.counts, send.offsets), MPI.BYTE]
        return self._start(
            lambda: self.mpi_comm.Iscatterv(blocks, [recv, MPI.BYTE], root),
            recv,
            send and send.buffer,
        )

    def bcast(self, buffer: Bytes, root: int) -> Handle:
        return self._start(lambda: self.mpi_comm.Ibcast([buffer, MPI.BYTE], root), buffer)

    def send(self, buffer: Bytes, dest: int, tag: int) -> Handle:
        if dest == self.rank:
            return self._own.send((dest, dest, tag), buffer)
        return self._begin(lambda: self.mpi_comm.Isend([buffer, MPI.BYTE], dest, tag), buffer)

    def recv(self, buffer: Bytes, source: int, tag: int) -> Handle:
        if source == self.rank:
            return self._own.recv((source, source, tag), buffer)
        return self._begin(lambda: self.mpi_comm.Irecv([buffer, MPI.BYTE], source, tag), buffer)

    def probe(self, source: int | None, tags: range) -> tuple[int, int] | None:
        return self._probe(source, tags)

    def _start(self, call: Callable[[], MPI.Request], *buffers: Bytes | None) -> Handle:
        if self.size == 1 and len(buffers) == 1:
            return _Finished()
        return self._begin(call, *buffers)

    def _begin(self, call: Callable[[], MPI.Request], *buffers: Bytes | None) -> Handle:
        try:
            return _Movement(call(), *buffers)
        except MPI.Exception as error:
            raise translated(error) from error

    def split(self, color: int | None, members: Sequence[int]) -> Transport | None:
        try:
            comm = self._make_comm(color, members)
            if comm is None:
                return None
            nodes = [self._nodes[member] for member in members]
            return MPITransport(comm, share=self._share, nodes=nodes)
        except MPI.Exception as error:
            raise TransportError(
                f"MPI made no further communicator: {error.Get_error_string()}; there is room for "
                "about a thousand in some MPIs: free() those that are no longer used"
            ) from error

    def _make_comm(self, color: int | None, members: Sequence[int]) -> MPI.Intracomm | None:
        if list(members) == list(range(self.size)):
            comm, request = self.mpi_comm.Idup()
            _finish(request)
            return comm
        key = 0 if color is None else members.index(self.rank)
        made = self.mpi_comm.Split(MPI.UNDEFINED if color is None else color, key)
        return None if color is None else cast(MPI.Intracomm, made)

    def offer_memory(self, nbytes: int) -> str:
        return make_file(nbytes)

    def open_memory(self, name: str, nbytes: int) -> Bytes | None:
        return open_file(name, nbytes)

    def close_memory(self, name: str) -> None:
        close_file(name)

    def free(self) -> None:
        self.control.close()
        self.mpi_comm.Free()

    def nodes(self) -> Sequence[int]:
        return self._nodes

    def progress(self) -> None:
        self.mpi_comm.Iprobe()

    def failed(self) -> list[int]:
        try:
            # MPI finds out about failures when it makes progress.
            try:
                self.mpi_comm.Iprobe()
            except MPI.Exception as error:
                if error.Get_error_class() == MPI.ERR_REVOKED:
                    raise
            dead = self.mpi_comm.Get_failed()
            return [
                rank
                for rank in dead.Translate_ranks(group=self.mpi_comm.Get_group())
                if rank != MPI.UNDEFINED
            ]
        except MPI.Exception as error:
            raise translated(error) from error

    def shrink(self) -> Transport | None:
        if not self.outlives:
            return None
        try:
            with suppress(MPI.Exception):
                self.mpi_comm.Revoke()
            comm = self.mpi_comm.Shrink()
            assert isinstance(comm, MPI.Intracomm)
            return MPITransport(comm, share=self._share)
        except MPI.Exception as error:
            raise translated(error) from error

    def abort(self, code: int) -> None:
        self.mpi_comm.Abort(code)


def _find_nodes(comm: MPI.Intracomm) -> Sequence[int]:
    """Return, for each rank, the first rank on its node."""
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    nodes: list[int] = comm.allgather(local.bcast(comm.rank))
    local.Free()
    return nodes


def _shared_memory(comm: MPI.Intracomm, nbytes: int) -> Bytes | None:
    """Map one zeroed file on all ranks, or return None on all if one of them cannot."""
    memory = _share_file(comm, nbytes)
    if memory is None:
        need_names()
        memory = _share_file(comm, nbytes)
    return memory


def _share_file(comm: MPI.Intracomm, nbytes: int) -> Bytes | None:
    own = make_file(nbytes) if comm.rank == 0 else ""
    path = np.frombuffer(own.encode().ljust(_PATH, b"\0"), np.uint8).copy()
    _finish(comm.Ibcast([path, MPI.BYTE]))
    memory = open_file(path.tobytes().rstrip(b"\0").decode(), nbytes)
    opened = np.array([memory is not None], np.int32)
    _finish(comm.Iallreduce(MPI.IN_PLACE, opened, MPI.MIN))
    if own:
        close_file(own)
    return memory if opened[0] else None


def _finish(request: MPI.Request) -> None:
    """Wait, and let others have the core: MPI's own wait would keep it from a rank that is late."""
    while not request.Test():
        os.sched_yield()
