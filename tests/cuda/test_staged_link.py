"""Movements by way of pinned memory, over devices in software."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from arraycomm import Communicator
from arraycomm._arrays import pinned
from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._arrays.pinned import Staging
from arraycomm._cuda.device import CudaMemory
from arraycomm._cuda.links.staged_link import HostStagedLink
from arraycomm._transports.base import Blocks, Handle
from tests.support import internals
from tests.support.device import software_device
from tests.support.on_ranks import each_rank_of

Array = np.ndarray[Any, Any]
CHUNK = 1024
GAP = 0x5A


@pytest.fixture(autouse=True)
def cuda() -> Iterator[Any]:
    with software_device() as machine:
        yield machine


class Pins:
    """Pinned memory; remembers the sizes of what was pinned."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> Array:
        self.sizes.append(nbytes)
        return pinned._pin(0, nbytes)


class Told(CudaMemory):
    """Tells which copies were asked of the device, beside what MPI was."""

    def __init__(self, device: int = 0) -> None:
        super().__init__(device)
        # Ranks that are threads would share the default stream.
        self.stream = self.own_stream
        self.log: list[str] = []

    def copy(self, target: DeviceBuffer, source: DeviceBuffer) -> None:
        self.log.append("back" if _is_pinned(source) else "out")
        super().copy(target, source)

    def elements(self, device_buffer: DeviceBuffer) -> Array:
        into = np.empty(device_buffer.size, device_buffer.dtype)
        self.download(device_buffer, into)
        return into


def _is_pinned(device_buffer: DeviceBuffer) -> bool:
    import cupy

    return bool(cupy.cuda.pinned_memory.is_memory_pinned(device_buffer.address))


def _link(
    comm: Communicator, pins: Pins | None = None, chunk: int = CHUNK
) -> tuple[HostStagedLink, Told]:
    memory = Told()
    return HostStagedLink(internals.transport(comm), memory, Staging(pins or Pins()), chunk), memory


def _logging(comm: Communicator, memory: Told, name: str) -> None:
    """Have the host's movements of one kind stand in the log."""
    link: Any = internals.transport(comm)
    usual = getattr(link, name)

    def movement(*args: Any) -> Handle:
        memory.log.append("mpi")
        handle: Handle = usual(*args)
        return handle

    setattr(link, name, movement)


@pytest.mark.parametrize("name", ["allreduce", "bcast", "allgather"])
@each_rank_of("several")
def test_copies_go_on_while_mpi_has_a_chunk(comm, name) -> None:
    chunk = 1 << 20 if name == "allreduce" else CHUNK
    with comm.dup() as apart, internals.forbid_segment(apart):
        pins = Pins()
        link, memory = _link(apart, pins, chunk)
        x = np.arange(9 * chunk // 4, dtype="float32") + comm.rank
        device_buffer = memory.upload(x).view("u1")
        chunks = 9
        _logging(apart, memory, "alltoall" if name == "allreduce" else name)
        if name == "allreduce":
            internals.finish(
                link.allreduce(device_buffer.view("f4"), device_buffer.view("f4"), "max")
            )
        elif name == "bcast":
            internals.finish(link.bcast(device_buffer, 0))
        else:
            counts = [len(device_buffer) // apart.size // 4 * 4] * apart.size
            offsets = [counts[0] * rank for rank in range(apart.size)]
            internals.finish(link.allgather(Blocks(device_buffer[: sum(counts)], counts, offsets)))
            chunks = -(-counts[0] // (chunk // apart.size))
        log = memory.log
        if name == "bcast" and comm.rank:
            assert log == ["mpi", *["back", "mpi"] * 8, "back"]
        else:
            # The next chunk is on its way before MPI has this one.
            places = [place for place, what in enumerate(log) if what == "mpi"]
            outs = [log[:place].count("out") for place in places]
            assert outs == [min(number + 2, chunks) for number in range(chunks)]
        got = memory.elements(device_buffer.view("f4"))
        first = x - comm.rank
        if name == "allgather":
            count = counts[0] // 4
            first = first[: count * apart.size] + np.arange(apart.size).repeat(count)
            got = got[: len(first)]
        assert np.array_equal(got, first + (apart.size - 1) * (name == "allreduce"))
        # However long the array, only so much memory is pinned.
        assert sum(pins.sizes) <= 4 * max(chunk, 4096)


def _scattered(lengths: list[int], fill: int) -> tuple[Array, list[int]]:
    """Memory with gaps between blocks of these lengths, the last one first."""
    offsets, at = [0] * len(lengths), 3
    for rank in reversed(range(len(lengths))):
        offsets[rank] = at
        at += lengths[rank] + 5
    return np.full(at, fill, np.uint8), offsets


# Some blocks are over in the first chunk, some in the second, which is read before others have come.
@pytest.mark.parametrize("scale", [0, 1, 200, 3000])
@each_rank_of("several")
def test_blocks_may_lie_anywhere(comm, scale) -> None:
    """Bytes between blocks are neither read nor written."""
    link, memory = _link(comm)
    ranks = range(comm.size)

    def made(lengths: list[int], rank: int | None) -> Blocks:
        """Blocks of which those of `rank`, or all, have elements."""
        array, offsets = _scattered(lengths, GAP)
        for r in ranks:
            if rank in (None, r):
                array[offsets[r] : offsets[r] + lengths[r]] = 1 + 10 * comm.rank + r
        return Blocks(memory.upload(array), lengths, offsets)

    def blocks(found: Blocks) -> list[list[int]]:
        array = memory.elements(found.buffer).copy()
        said = []
        for r in ranks:
            part = array[found.offsets[r] : found.offsets[r] + found.counts[r]]
            said.append(sorted(set(part.tolist())))
            part[...] = GAP
        assert (array == GAP).all()
        return said

    def values(lengths: list[int], of: list[int]) -> list[list[int]]:
        return [[value] if n else [] for n, value in zip(lengths, of, strict=True)]

    sent = [scale * (r + comm.rank) for r in ranks]
    recv = made(sent, comm.size)
    internals.finish(link.alltoall(made(sent, None), recv))
    assert blocks(recv) == values(sent, [1 + 10 * r + comm.rank for r in ranks])

    lengths = [scale * r for r in ranks]
    recv = made(lengths, comm.rank)
    internals.finish(link.allgather(recv))
    assert blocks(recv) == values(lengths, [1 + 11 * r for r in ranks])

    for root in ranks:
        mine = memory.upload(np.full(lengths[comm.rank], 1 + comm.rank, np.uint8))
        recv = made(lengths, comm.size)
        internals.finish(link.gather(mine, recv if comm.rank == root else None, root))
        assert comm.rank != root or blocks(recv) == values(lengths, [1 + r for r in ranks])
        into = memory.upload(np.full(lengths[comm.rank], 255, np.uint8))
        send = made(lengths, None) if comm.rank == root else None
        internals.finish(link.scatter(send, into, root))
        assert (memory.elements(into) == 1 + 10 * root + comm.rank).all()


@each_rank_of("several")
def test_movement_keeps_to_the_stream_in_which_it_began(comm) -> None:
    class Streams(Told):
        def copy(self, target: DeviceBuffer, source: DeviceBuffer) -> None:
            streams.add(self.stream)
            super().copy(target, source)

    streams: set[int] = set()
    memory, kept = Streams(), Told()
    first, other = memory.own_stream, kept.own_stream
    link = HostStagedLink(internals.transport(comm), memory, Staging(Pins()), CHUNK).at(first)
    handle = link.bcast(link.memory.upload(np.ones(5000, np.uint8)), 0)
    assert link.at(other).memory.stream == other
    internals.finish(handle)
    assert streams == {first}


@each_rank_of("several")
def test_pinned_memory_is_kept_while_the_device_copies_from_it(comm, cuda) -> None:
    class Later(Told):
        """Copies nothing back before it may."""

        def __init__(self) -> None:
            super().__init__()
            self.may = threading.Event()

        def copy(self, target: DeviceBuffer, source: DeviceBuffer) -> None:
            if _is_pinned(source):
                cuda.stream(self.stream).put("hold", lambda: self.may.wait(20))
            super().copy(target, source)

    memory, staging = Later(), Staging(Pins())
    link = HostStagedLink(internals.transport(comm), memory, staging, CHUNK)
    device_buffer = memory.upload(np.full(700, comm.rank + 1, np.uint8))
    target = memory.allocate(700)
    internals.finish(link.allreduce(device_buffer, target, "max"))
    for _ in range(4):
        staging.empty(4096)[...] = 0
    memory.may.set()
    assert (memory.elements(target) == comm.size).all()
