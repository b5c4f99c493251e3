"""Movements between devices over pinned memory of their hosts, for an MPI without GPU support.

Allreduce, broadcast and allgather go chunk by chunk. While MPI moves one chunk, the device copies
the next one to the host, and the one before back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, ParamSpec, Self

from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory, Event
from arraycomm._arrays.pinned import Copy, Staging, pinned, staged_chunks, unstaged_chunks
from arraycomm._cuda.links.link import DeviceLink
from arraycomm._dtypes import DType
from arraycomm._reduce import algorithms
from arraycomm._reduce.selection import CHUNK_BYTES
from arraycomm._transports.base import Blocks, Bytes, Handle, Steps, Transport

# Bytes of a chunk; the host's allreduce takes chunks of the same size.
CHUNK: Final = CHUNK_BYTES
P = ParamSpec("P")


class _Sequence:
    """A movement of several, each of which begins when the one before has finished."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        # At once, so that the first copy is put on the stream now.
        self._waiting: Handle | None = next(steps, None)

    @property
    def local(self) -> bool:
        """Whether only this rank's own device is waited for."""
        return isinstance(self._waiting, _OwnDevice)

    def done(self) -> bool:
        while self._waiting is not None:
            if not self._waiting.done():
                return False
            self._waiting = next(self._steps, None)
        return True


def _in_sequence(steps: Callable[P, Steps]) -> Callable[P, Handle]:
    """Make a movement of the movements that a generator yields."""

    def begin(*args: P.args, **kwargs: P.kwargs) -> Handle:
        return _Sequence(steps(*args, **kwargs))

    return begin


class HostStagedLink(DeviceLink):
    """The host transport's movements, over copies of device memory in pinned memory.

    By default `staging` is this process's. A `chunk` has the same number of bytes on all ranks.
    """

    name = "staged"
    # Bytes that reductions other than allreduce have in pinned memory at once.
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
        self._staging = pinned(memory.device) if staging is None else staging
        self._chunk = chunk

    def over(self, transport: Transport) -> Self:
        return type(self)(transport, self.memory.separate(), self._staging, self._chunk)

    # Chunk by chunk

    def reduces(self, op: str, dtype: DType) -> bool:
        """Return True: the host reduces every dtype, by the same rules as a device."""
        return True

    @_in_sequence
    def allreduce(self, source: DeviceBuffer, target: DeviceBuffer, op: str) -> Steps:
        dtype = source.dtype
        sources = staged_chunks(source, self._chunk, self._staging)
        for free, into in unstaged_chunks(target, self._chunk, self._staging):
            event, chunk = next(sources)
            yield from _wait_for(event, free)
            reduced = into.view(dtype)
            yield from algorithms.allreduce(self._transport, chunk.view(dtype), reduced, op)

    @_in_sequence
    def bcast(self, buffer: DeviceBuffer, root: int) -> Steps:
        chunks = staged_chunks if self.rank == root else unstaged_chunks
        for event, chunk in chunks(buffer, self._chunk, self._staging):
            yield from _wait_for(event)
            yield self._transport.bcast(chunk, root)

    @_in_sequence
    def allgather(self, recv: Blocks) -> Steps:
        copy = Copy(self.memory, self._staging)
        step = max(self._chunk // self.size, 1)
        rounds = [_part(recv, start, step) for start in range(0, max(recv.counts), step)]
        prefetched = [self._fetch(copy, part) for part in rounds[:1]]
        for number, part in enumerate(rounds):
            event, rows = prefetched.pop()
            if number + 1 < len(rounds):
                prefetched.append(self._fetch(copy, rounds[number + 1]))
            # After this event the copies back of two rounds ago have left their pinned memory.
            yield from _wait_for(event)
            yield self._transport.allgather(rows)
            self._put(copy, part, rows)

    def _fetch(self, copy: Copy, part: Blocks) -> tuple[Event | None, Blocks]:
        """Copy this rank's own block from the device to its row among those of all ranks."""
        rows = self._pinned_rows(part)
        local = rows.block(self.rank)
        return (copy.out(part.block(self.rank), local) if len(local) else None), rows

    # In one piece

    @_in_sequence
    def alltoall(self, send: Blocks, recv: Blocks) -> Steps:
        copy = Copy(self.memory, self._staging)
        event, rows = self._take_out(copy, send)
        yield from _wait_for(event)
        into = self._pinned_rows(recv)
        yield self._transport.alltoall(rows, into)
        self._put(copy, recv, into)

    @_in_sequence
    def gather(self, send: DeviceBuffer, recv: Blocks | None, root: int) -> Steps:
        copy = Copy(self.memory, self._staging)
        event, rows = self._take_out(copy, _whole(send))
        yield from _wait_for(event)
        into = None if recv is None else self._pinned_rows(recv)
        yield self._transport.gather(rows.buffer, into, root)
        if recv is not None and into is not None:
            self._put(copy, recv, into)

    @_in_sequence
    def scatter(self, send: Blocks | None, recv: DeviceBuffer, root: int) -> Steps:
        copy = Copy(self.memory, self._staging)
        event, rows = (None, None) if send is None else self._take_out(copy, send)
        yield from _wait_for(event)
        into = self._pinned_rows(_whole(recv))
        yield self._transport.scatter(rows, into.buffer, root)
        self._put(copy, _whole(recv), into)

    def _pinned_rows(self, blocks: Blocks) -> Blocks:
        """Return pinned memory for blocks of these lengths, one after another."""
        offsets = [0, *accumulate(blocks.counts)]
        return Blocks(self._staging.empty(offsets.pop()), blocks.counts, offsets)

    def _take_out(self, copy: Copy, blocks: Blocks) -> tuple[Event | None, Blocks]:
        """Copy blocks from the device; return the event after the copies, and the rows."""
        rows, event = self._pinned_rows(blocks), None
        for block, row in _pairs(blocks, rows):
            event = copy.out(block, row)
        return event, rows

    def _put(self, copy: Copy, blocks: Blocks, rows: Blocks) -> None:
        """Copy blocks to the device."""
        for block, row in _pairs(blocks, rows):
            copy.back(block, row)


class _OwnDevice:
    """A wait until this rank's own device has reached an event."""

    def __init__(self, event: Event) -> None:
        self.done = event.done


def _wait_for(*events: Event | None) -> Steps:
    """Wait until the device has reached each of these."""
    for event in events:
        if event is not None:
            yield _OwnDevice(event)


def _part(blocks: Blocks, start: int, count: int) -> Blocks:
    """Return at most `count` bytes of each block, from `start` on."""
    counts = [min(max(length - start, 0), count) for length in blocks.counts]
    return Blocks(blocks.buffer, counts, [offset + start for offset in blocks.offsets])


def _whole(device_buffer: DeviceBuffer) -> Blocks:
    return Blocks(device_buffer, [len(device_buffer)], [0])


def _pairs(blocks: Blocks, rows: Blocks) -> Sequence[tuple[DeviceBuffer, Bytes]]:
    """Return each block with its row; one pair for all if blocks and rows are laid out alike."""
    first = blocks.offsets[0]
    if list(blocks.offsets) == [first + offset for offset in rows.offsets]:
        whole = blocks.buffer[first : first + len(rows.buffer)]
        return [(whole, rows.buffer)] if len(rows.buffer) else []
    return [
        (blocks.block(rank), rows.block(rank)) for rank, count in enumerate(blocks.counts) if count
    ]
