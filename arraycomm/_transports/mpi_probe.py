"""Which message has come to this rank over MPI, or from itself, without taking it."""

from __future__ import annotations

from mpi4py import MPI

from arraycomm._transports.mailbox import Mailbox
from arraycomm._transports.mpi_failures import translated

Found = tuple[int, int] | None


class MessageProbe:
    """Looks for messages of other ranks, and for those of this rank, which are not MPI's."""

    def __init__(self, comm: MPI.Intracomm, own: Mailbox) -> None:
        self._comm, self._own = comm, own
        self._own_first = False

    def __call__(self, source: int | None, tags: range) -> Found:
        """Return source and tag of a message; see `Transport.probe`."""
        looks = [self._among_others, self._among_own]
        # In turn, so that neither waits for the end of a stream of the other's.
        self._own_first = not self._own_first
        for look in looks[::-1] if self._own_first else looks:
            found = look(source, tags)
            if found is not None:
                return found
        return None

    def _among_others(self, source: int | None, tags: range) -> Found:
        rank, status = MPI.ANY_SOURCE if source is None else source, MPI.Status()
        try:
            come = self._comm.Iprobe(rank, tags[0] if len(tags) == 1 else MPI.ANY_TAG, status)
        except MPI.Exception as error:
            raise translated(error) from error
        # Pieces of messages and control messages have tags of their own; who waits for them takes them.
        return (status.source, status.tag) if come and status.tag in tags else None

    def _among_own(self, source: int | None, tags: range) -> Found:
        return self._own.probe(source, self._comm.rank, tags)
