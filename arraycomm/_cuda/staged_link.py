"""Movements between devices by way of pinned memory of their hosts, where MPI knows of no other.

Reductions of all to all, broadcasts and allgathers go chunk by chunk: while MPI has one in hand, the
device copies the next one out, and the one before back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory, Event
from arraycomm._arrays.pinned import Copy, Staging, pinned, staged_chunks, unstaged_chunks
from arraycomm._collectives import algorithms
from arraycomm._dtypes import DType
from arraycomm._transports.base import Blocks, Bytes, DeviceLink, Handle, Steps, Transport

# Bytes in hand at once; the host reduces as many in one round.
CHUNK: Final = algorithms.CHUNK_BYTES


class HostStagedLink(DeviceLink):
    """The host transport's movements, over copies of what is on the device.

    Parameters
    ----------
    transport : Transport
        Joins the hosts.
    memory : Memory
        The device's.
    staging : Staging, optional
        Where pinned memory comes from; this process's own by default.
    chunk : int
        How many bytes go at once where that can be, and the same on all ranks.
    """

    name = "staged"
    # What other reductions than allreduce have in pinned memory at once.
    chunk_bytes = 16 << 20

    def __init__(
        self,
        transport: Transport,
        memory: DeviceMemory,
        staging: Staging | None = None,
        chunk: int = CHUNK,
    ) -> None:
        self._transport = transport
        self.memory = memory
        self.rank, self.size = transport.rank, transport.size
        self._staging = pinned() if staging is None else staging
        self._chunk = chunk

    # Chunk by chunk

    def native(self, op: str, dtype: DType) -> bool:
        """All that the host reduces, it reduces by the same rules as a device."""
        return True

    def allreduce(self, source: DeviceBuffer, target: DeviceBuffer, op: str) -> Handle:
        return _Playing(self._allreduce(source, target, op))

    def _allreduce(self, source: DeviceBuffer, target: DeviceBuffer, op: str) -> Steps:
        dtype = source.dtype
        lifted = staged_chunks(source, self._chunk, self._staging)
        for free, into in unstaged_chunks(target, self._chunk, self._staging):
            here, chunk = next(lifted)
            yield from _come(here, free)
            reduced = into.view(dtype)
            yield from algorithms.allreduce(self._transport, chunk.view(dtype), reduced, op)

    def bcast(self, buffer: DeviceBuffer, root: int) -> Handle:
        return _Playing(self._bcast(buffer, root))

    def _bcast(self, buffer: DeviceBuffer, root: int) -> Steps:
        chunks = staged_chunks if self.rank == root else unstaged_chunks
        for event, chunk in chunks(buffer, self._chunk, self._staging):
            yield from _come(event)
            yield self._transport.bcast(chunk, root)

    def allgather(self, recv: Blocks) -> Handle:
        return _Playing(self._allgather(recv))

    def _allgather(self, recv: Blocks) -> Steps:
        copy = Copy(self.memory, self._staging)
        step = max(self._chunk // self.size, 1)
        rounds = [_part(recv, start, step) for start in range(0, max(recv.counts), step)]
        ahead = [self._lift(copy, part) for part in rounds[:1]]
        for number, part in enumerate(rounds):
            here, rows = ahead.pop()
            if number + 1 < len(rounds):
                ahead.append(self._lift(copy, rounds[number + 1]))
            # What came back to the device two rounds ago has left its memory by then.
            yield from _come(here)
            yield self._transport.allgather(rows)
            self._put(copy, part, rows)

    def _lift(self, copy: Copy, part: Blocks) -> tuple[Event | None, Blocks]:
        """Copy this rank's own block to its place among all."""
        rows = self._room(part)
        mine = rows.block(self.rank)
        return (copy.out(part.block(self.rank), mine) if len(mine) else None), rows

    # As a whole

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        return _Playing(self._alltoall(send, recv))

    def _alltoall(self, send: Blocks, recv: Blocks) -> Steps:
        copy = Copy(self.memory, self._staging)
        here, rows = self._taken(copy, send)
        yield from _come(here)
        into = self._room(recv)
        yield self._transport.alltoall(rows, into)
        self._put(copy, recv, into)

    def gather(self, send: DeviceBuffer, recv: Blocks | None, root: int) -> Handle:
        return _Playing(self._gather(send, recv, root))

    def _gather(self, send: DeviceBuffer, recv: Blocks | None, root: int) -> Steps:
        copy = Copy(self.memory, self._staging)
        here, rows = self._taken(copy, _whole(send))
        yield from _come(here)
        into = None if recv is None else self._room(recv)
        yield self._transport.gather(rows.buffer, into, root)
        if recv is not None and into is not None:
            self._put(copy, recv, into)

    def scatter(self, send: Blocks | None, recv: DeviceBuffer, root: int) -> Handle:
        return _Playing(self._scatter(send, recv, root))

    def _scatter(self, send: Blocks | None, recv: DeviceBuffer, root: int) -> Steps:
        copy = Copy(self.memory, self._staging)
        here, rows = (None, None) if send is None else self._taken(copy, send)
        yield from _come(here)
        into = self._room(_whole(recv))
        yield self._transport.scatter(rows, into.buffer, root)
        self._put(copy, _whole(recv), into)

    def _room(self, blocks: Blocks) -> Blocks:
        """Return pinned memory for blocks of these lengths, side by side."""
        offsets = [0, *accumulate(blocks.counts)]
        return Blocks(self._staging.empty(offsets.pop()), blocks.counts, offsets)

    def _taken(self, copy: Copy, blocks: Blocks) -> tuple[Event | None, Blocks]:
        """Copy blocks from the device; they are there when it has come to the mark."""
        rows, event = self._room(blocks), None
        for there, here in _pairs(blocks, rows):
            event = copy.out(there, here)
        return event, rows

    def _put(self, copy: Copy, blocks: Blocks, rows: Blocks) -> None:
        """Copy blocks to the device."""
        for there, here in _pairs(blocks, rows):
            copy.back(there, here)


class _Playing:
    """A movement of several, each of which begins when the one before has finished."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        # At once, so that what is copied first has its place in the stream.
        self._waiting: Handle | None = next(steps, None)

    def done(self) -> bool:
        while self._waiting is not None:
            if not self._waiting.done():
                return False
            self._waiting = next(self._steps, None)
        return True


def _come(*marks: Event | None) -> Steps:
    """Wait until the device has come to each of these."""
    for event in marks:
        if event is not None:
            yield event


def _part(blocks: Blocks, start: int, count: int) -> Blocks:
    """Return so many bytes of each block, from `start` on."""
    counts = [min(max(length - start, 0), count) for length in blocks.counts]
    return Blocks(blocks.buffer, counts, [offset + start for offset in blocks.offsets])


def _whole(device_buffer: DeviceBuffer) -> Blocks:
    return Blocks(device_buffer, [len(device_buffer)], [0])


def _pairs(blocks: Blocks, rows: Blocks) -> Sequence[tuple[DeviceBuffer, Bytes]]:
    """Each block and its row; all in one where the blocks lie side by side as the rows do."""
    first = blocks.offsets[0]
    if list(blocks.offsets) == [first + offset for offset in rows.offsets]:
        whole = blocks.buffer[first : first + len(rows.buffer)]
        return [(whole, rows.buffer)] if len(rows.buffer) else []
    return [
        (blocks.block(rank), rows.block(rank)) for rank, count in enumerate(blocks.counts) if count
    ]
