"""Ranks as MPI processes, through mpi4py.

On one node the control channel is a file that all ranks map; between nodes it sends messages. Large
movements are nonblocking collectives of bytes: MPI sees no dtype, and reduces nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

from mpi4py import MPI

from arraycomm._errors import TransportError
from arraycomm._transports.base import (
    DIRECT_RANKS,
    Blocks,
    Bytes,
    Handle,
    Repeated,
    Transport,
    Wait,
    poll,
)
from arraycomm._transports.control import ControlChannel, SharedControl
from arraycomm._transports.lives import DELAY, Lives, find_lives
from arraycomm._transports.mailbox import Mailbox
from arraycomm._transports.mpi.under_way import (
    NOTES_TAG,
    Movement,
    MpiReceive,
    MpiSend,
    failed_ranks,
    finish,
    shared_memory,
    shrunk,
    survives_failures,
    tell_and_agree,
    translated,
)

if TYPE_CHECKING:
    from arraycomm._transports.mpi.direct import DirectMessages
    from arraycomm._transports.mpi.routes import Relay

# Polls before a waiting rank gives up its core. More would delay the rank that it waits for, if
# both share the core.
_SPINS: Final = 8
# Seconds in which an MPI that survives a death knows of it.
_MPI_KNOWS: Final = 5.0


class MPITransport(Transport):
    """One rank of an MPI communicator that belongs to this transport alone."""

    name = "mpi"
    spins = _SPINS
    copied = 64 << 10

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        share: bool = True,
        nodes: Sequence[int] | None = None,
        lives: Lives | None = None,
    ) -> None:
        self.mpi_comm: MPI.Intracomm = comm
        self.rank, self.size = comm.rank, comm.size
        self.threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.shrinks = survives_failures()
        self.death_delay = _MPI_KNOWS if self.shrinks else DELAY
        self._share = share
        # Messages of this rank to itself: MPI may finish a send only when it is received.
        self._own = Mailbox()
        # Whether these are looked at first: in turn, so that neither of two streams has to end.
        self._own_first = False
        known = _nodes_and_lives(comm) if nodes is None else (nodes, lives or Lives({}))
        self._nodes, self._lives = known
        own = self._nodes[self.rank]
        self.local_rank = self._nodes[: self.rank].count(own)
        self.local_size = self._nodes.count(own)
        memory = None
        if share and self.local_size == self.size:
            memory = shared_memory(comm, SharedControl.nbytes(self.size))
        # Between nodes, messages that nobody finds who looks for a user's.
        self._between: MPI.Intracomm | None = None
        self._direct: DirectMessages | None = None
        self._relay: Callable[[Bytes, int], Relay] | None = None
        self.control: ControlChannel
        if memory is None:
            self._reach_other_nodes()
        else:
            self.control = SharedControl(self.rank, self.size, memory)

    def _reach_other_nodes(self) -> None:
        """Make what only ranks without memory of all in common need, and import it."""
        from arraycomm._transports.mpi.chain import make_chain
        from arraycomm._transports.mpi.control import MpiControl
        from arraycomm._transports.mpi.direct import DirectMessages
        from arraycomm._transports.mpi.pieces import agreed
        from arraycomm._transports.mpi.routes import Places, Relay

        comm, self.overlaps = self.mpi_comm, True
        self._between = between = _duplicate(comm)
        places, pieces = Places(self._nodes), agreed(comm)
        units = self._nodes if self._share else range(self.size)
        self.control = MpiControl(comm, between, units, pieces)
        if 1 < self.size <= DIRECT_RANKS:
            self._direct = DirectMessages(between, places, pieces)
        if self._share:
            self.chain = make_chain(comm, between, places, pieces)
        broadcasts = count(1)
        self._relay = lambda buffer, root: Relay(
            between, root, places, buffer, pieces, next(broadcasts)
        )

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        if self._direct is not None:
            return self._direct.alltoall(send, recv)
        return Movement(self.mpi_comm.Ialltoallv, _vector(send), _vector(recv))

    def allgather(self, recv: Blocks) -> Handle:
        if self._direct is not None:
            return self._direct.allgather(recv)
        return Movement(self.mpi_comm.Iallgatherv, MPI.IN_PLACE, _vector(recv))

    def gather(self, send: Bytes, recv: Blocks | None, root: int) -> Handle:
        into = recv and _vector(recv)
        return Movement(self.mpi_comm.Igatherv, [send, MPI.BYTE], into, root)

    def scatter(self, send: Blocks | None, recv: Bytes, root: int) -> Handle:
        parts = send and _vector(send)
        return Movement(self.mpi_comm.Iscatterv, parts, [recv, MPI.BYTE], root)

    def bcast(self, buffer: Bytes, root: int) -> Handle:
        if self._relay is not None:
            return self._relay(buffer, root)
        return Movement(self.mpi_comm.Ibcast, [buffer, MPI.BYTE], root)

    def send(self, buffer: Bytes, dest: int, tag: int) -> Handle:
        if dest == self.rank:
            return self._own.send((dest, dest, tag), buffer)
        start = self.mpi_comm.Isend if len(buffer) <= self.copied else self.mpi_comm.Issend
        return Movement(start, [buffer, MPI.BYTE], dest, tag)

    def recv(self, buffer: Bytes, source: int, tag: int) -> Handle:
        if source == self.rank:
            return self._own.recv((source, source, tag), buffer)
        return Movement(self.mpi_comm.Irecv, [buffer, MPI.BYTE], source, tag)

    def repeated_send(self, buffer: Bytes, dest: int, tag: int) -> Repeated:
        return MpiSend(self.mpi_comm, buffer, dest, tag)

    def repeated_recv(self, buffer: Bytes, source: int, tag: int) -> Repeated:
        return MpiReceive(self.mpi_comm, buffer, source, tag)

    def probe(self, source: int | None, tags: range) -> tuple[int, int] | None:
        self._own_first = not self._own_first
        looks = [self._own_message, self._message]
        found = (look(source, tags) for look in (looks if self._own_first else reversed(looks)))
        return next(filter(None, found), None)

    def _own_message(self, source: int | None, tags: range) -> tuple[int, int] | None:
        return self._own.probe(source, self.rank, tags)

    def _message(self, source: int | None, tags: range) -> tuple[int, int] | None:
        rank, status = MPI.ANY_SOURCE if source is None else source, MPI.Status()
        try:
            come = self.mpi_comm.Iprobe(rank, tags[0] if len(tags) == 1 else MPI.ANY_TAG, status)
            if come and status.tag == NOTES_TAG:
                # Left unread between nodes by a communicator whose number this one has now; it
                # would hide others. Its sender may be no rank here.
                note = self.mpi_comm.Improbe(MPI.ANY_SOURCE, NOTES_TAG, status)
                if note is not None:
                    note.Recv(bytearray(status.Get_count(MPI.BYTE)))
                return None
        except MPI.Exception as error:
            raise translated(error) from error
        # Pieces of messages and control messages have tags of their own; who waits for them takes
        # them.
        return (status.source, status.tag) if come and status.tag in tags else None

    def split(
        self, color: int | None, members: Sequence[int], wait: Wait = poll
    ) -> Transport | None:
        try:
            comm = self._make_comm(color, members)
            if comm is None:
                return None
            nodes = [self._nodes[member] for member in members]
            lives = self._lives.of(members)
            return MPITransport(comm, share=self._share, nodes=nodes, lives=lives)
        except (MPI.Exception, TransportError) as error:
            said = translated(error) if isinstance(error, MPI.Exception) else error
            raise TransportError(
                f"MPI made no further communicator. {said}; there is room for about a thousand in "
                "some MPIs: free() those that are no longer used"
            ) from error

    def _make_comm(self, color: int | None, members: Sequence[int]) -> MPI.Intracomm | None:
        if list(members) == list(range(self.size)):
            return _duplicate(self.mpi_comm)
        key = 0 if color is None else members.index(self.rank)
        made = self.mpi_comm.Split(MPI.UNDEFINED if color is None else color, key)
        return None if color is None else cast(MPI.Intracomm, made)

    def free(self) -> None:
        self.control.close()
        if self.chain is not None:
            self.chain.control.close()
        if self._between is not None:
            self._between.Free()
        self.mpi_comm.Free()

    def nodes(self) -> Sequence[int]:
        return self._nodes

    def progress(self) -> None:
        self.mpi_comm.Iprobe()

    def failed(self) -> list[int]:
        # What MPI knows first: its messages fail then.
        known = failed_ranks(self.mpi_comm) if self.shrinks else []
        return known or self._lives.dead(self.control.notes)

    def shrink(self) -> Transport | None:
        if not self.shrinks:
            return None
        try:
            return MPITransport(shrunk(self.mpi_comm, self._between), share=self._share)
        except MPI.Exception as error:
            raise translated(error) from error

    def abort(self, code: int) -> None:
        self.mpi_comm.Abort(code)


def _duplicate(comm: MPI.Intracomm) -> MPI.Intracomm:
    made, _ = finish(comm.Idup)
    return cast(MPI.Intracomm, made)


def _nodes_and_lives(comm: MPI.Intracomm) -> tuple[Sequence[int], Lives]:
    """Return, for each rank, the first rank on its node; and the lives of the ranks on this one."""
    here = cast(MPI.Intracomm, comm.Split_type(MPI.COMM_TYPE_SHARED))
    nodes: list[int] = comm.allgather(here.bcast(comm.rank))
    members = [rank for rank, node in enumerate(nodes) if node == nodes[comm.rank]]
    lives = find_lives(*tell_and_agree(here), here.rank, members)
    here.Free()
    return nodes, lives


def _vector(blocks: Blocks) -> Any:
    """Return blocks as MPI takes them."""
    return [blocks.buffer, (blocks.counts, blocks.offsets), MPI.BYTE]
