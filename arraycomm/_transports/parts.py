"""The movements of ranks that hand one another parts of memory, whichever way these go."""

from __future__ import annotations

import abc

from arraycomm._transports.base import Blocks, Bytes, Handle, Transport

# What goes to each rank, or comes from each: those without a part are not named.
Parts = dict[int, Bytes]


class PartsTransport(Transport):
    """A transport all of whose movements send one part to each of some ranks."""

    @abc.abstractmethod
    def move(self, parts: Parts, into: Parts) -> Handle:
        """Send a part to each rank that there is one for, and receive one from each.

        A part of this rank for itself may be the memory that it goes to.
        """

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        return self.move(_parts(send), _parts(recv))

    def allgather(self, recv: Blocks) -> Handle:
        into = _parts(recv)
        return self.move(dict.fromkeys(into, into[self.rank]), into)

    def gather(self, send: Bytes, recv: Blocks | None, root: int) -> Handle:
        return self.move({root: send}, _parts(recv))

    def scatter(self, send: Blocks | None, recv: Bytes, root: int) -> Handle:
        return self.move(_parts(send), {root: recv})

    def bcast(self, buffer: Bytes, root: int) -> Handle:
        parts = dict.fromkeys(range(self.size), buffer) if self.rank == root else {}
        return self.move(parts, {root: buffer})


def _parts(blocks: Blocks | None) -> Parts:
    return {} if blocks is None else {r: blocks.block(r) for r in range(len(blocks.counts))}
