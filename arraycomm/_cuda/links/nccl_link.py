"""Movements between CUDA devices through NCCL; a transport joins their hosts.

Everything is in the order of one stream. A movement is finished for the host once it is on that
stream, and later work on the device comes after it. Movements are of bytes, whatever the dtype.
NCCL reduces only if the result does not depend on the order, or the order may be NCCL's own.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator, Iterator, Sequence
from typing import Final

import numpy as np

from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory
from arraycomm._cuda.device import shared_devices
from arraycomm._cuda.links.libnccl import UINT8, Call, Comm, Library
from arraycomm._cuda.links.link import DeviceLink, Nothing
from arraycomm._dtypes import BY_DTYPE, DType, Kind, kind_of
from arraycomm._errors import TransportError
from arraycomm._transports.base import Blocks, Handle

# ncclRedOp_t
_OPS: Final = {"sum": 0, "prod": 1, "max": 2, "min": 3}
# Reductions whose bits do not depend on the order, and those whose rounding does. NCCL reduces no
# other: its min and max of floats lose NaN, and it rounds floats of 16 and 8 bits at every step.
_EXACT: Final = {Kind.INTEGER: frozenset(_OPS)}
_ROUNDED: Final = {Kind.FLOAT: frozenset(("sum", "prod")), Kind.COMPLEX: frozenset(("sum",))}
# Of a rank, to check the order of them.
_NUMBER: Final = np.dtype(np.uint32)
_FIRST_TO_SHARE: Final = (2, 30)


class _Operation:
    """An operation that NCCL is putting on the stream."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._over = False

    def done(self) -> bool:
        if not self._over:
            self._over = not self._comm.in_progress()
        return self._over


class NcclLink(DeviceLink):
    """The link of one rank's device to those of the other ranks, by a `comm` not in progress.

    Movements are put on the memory's stream. If it is `reproducible`, floats have to be summed in
    rank order, which NCCL does not do.
    """

    name = "nccl"
    async_check = True
    # Enough for NCCL to reach full speed, and not too much scratch memory for a device.
    chunk_bytes = 64 << 20

    def __init__(
        self, comm: Comm, memory: DeviceMemory, rank: int, size: int, *, reproducible: bool = True
    ) -> None:
        self.memory = memory
        self.rank = rank
        self.size = size
        self.comm = comm
        self._reproducible = reproducible
        # What gathers the digests of the call's headers, in its first movement.
        self._showing: tuple[Call, DeviceBuffer] | None = None

    @classmethod
    def open(
        cls,
        library: Library,
        memory: DeviceMemory,
        rank: int,
        size: int,
        unique_id: bytes,
        *,
        reproducible: bool = True,
    ) -> Generator[Handle, None, NcclLink]:
        """Join the ranks that have the same `unique_id`; a generator that returns the link.

        It waits until all ranks have come. If it is closed or an error is thrown in, it aborts.
        """
        comm = Comm.begin(library, memory.device, rank, size, unique_id)
        try:
            yield _Operation(comm)
        except BaseException:
            comm.abort()
            raise
        return cls(comm, memory, rank, size, reproducible=reproducible)

    def split(self, color: int | None, key: int) -> Generator[Handle, None, NcclLink | None]:
        """Make the link of the ranks of one color, in the order of their keys; a generator.

        Collective, also for ranks of no color, which get None. If this NCCL is too old to split,
        all ranks get None, and `open` makes a new link.
        """
        child = self.comm.split(color, key)
        if child is None:
            return None
        try:
            yield _Operation(self.comm)
            if color is None:
                return None
            yield _Operation(child)
            # With a memory of its own, since its calls use other streams.
            memory = self.memory.separate()
            return type(self)(child, memory, *child.place(), reproducible=self._reproducible)
        except BaseException:
            # The split is an operation of the old communicator.
            self.comm.abort()
            child.abort()
            raise

    def check_order(self) -> Generator[Handle, None, None]:
        """Gather the ranks' numbers, and raise unless they come in the order of the ranks."""
        link, width = self.at(self.memory.own_stream), _NUMBER.itemsize
        numbers = link.empty(self.size, _NUMBER)
        mine = link.memory.upload(np.array([self.rank], _NUMBER))
        numbers[self.rank : self.rank + 1] = mine
        offsets = range(0, width * self.size, width)
        yield link.allgather(Blocks(numbers.view(np.uint8), [width] * self.size, offsets))
        yield link.memory.record()
        found = np.empty(self.size, _NUMBER)
        link.memory.download(numbers, found)
        if found.tolist() != list(range(self.size)):
            raise TransportError(f"it gathered the ranks in a wrong order: {found.tolist()}")

    # Digests

    def show(self, digest: int, digests: DeviceBuffer) -> None:
        if self.size > 1:
            mine = digests[self.size :]
            self.put_digest(digest, mine)
            self.gather_digests(mine, digests)

    def gather_digests(self, mine: DeviceBuffer, digests: DeviceBuffer) -> None:
        """Have the ranks' digests gathered as `show` does; this one's is in the memory `mine`."""
        gathered = digests[: self.size]
        call: Call = ("ncclAllGather", mine.address, gathered.address, mine.nbytes, UINT8)
        self._showing = call, gathered

    def put_digest(self, digest: int, into: DeviceBuffer) -> None:
        """Put a digest on the device, once that comes to it."""
        for half in range(2):
            self.memory.write(into.address + 4 * half, digest >> 32 * half & 0xFFFFFFFF)

    # Movements

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        recv.block(self.rank)[...] = send.block(self.rank)
        return self._start([*self._sends(send), *self._recvs(recv)], send.buffer, recv.buffer)

    def allgather(self, recv: Blocks) -> Handle:
        count = recv.counts[0]
        if _in_equal_rows(recv):
            local = recv.block(self.rank)
            # NCCL sees by the addresses that this is in place.
            even: Call = ("ncclAllGather", local.address, recv.buffer.address, count, UINT8)
            return self._start([even] if count else [], recv.buffer)
        blocks = [recv.block(rank) for rank in range(self.size)]
        calls = [self._broadcast(block, rank) for rank, block in enumerate(blocks) if len(block)]
        return self._start(calls, recv.buffer)

    def gather(self, send: DeviceBuffer, recv: Blocks | None, root: int) -> Handle:
        if recv is None:
            return self._start([_send(send, root)] if len(send) else [], send)
        recv.block(root)[...] = send
        return self._start(list(self._recvs(recv)), send, recv.buffer)

    def scatter(self, send: Blocks | None, recv: DeviceBuffer, root: int) -> Handle:
        if send is None:
            return self._start([_recv(recv, root)] if len(recv) else [], recv)
        recv[...] = send.block(root)
        return self._start(list(self._sends(send)), send.buffer, recv)

    def bcast(self, buffer: DeviceBuffer, root: int) -> Handle:
        return self._start([self._broadcast(buffer, root)] if len(buffer) else [], buffer)

    def _sends(self, blocks: Blocks) -> Iterator[Call]:
        return (_send(block, peer) for peer, block in self._others(blocks))

    def _recvs(self, blocks: Blocks) -> Iterator[Call]:
        return (_recv(block, peer) for peer, block in self._others(blocks))

    def _others(self, blocks: Blocks) -> Iterator[tuple[int, DeviceBuffer]]:
        """Yield the other ranks' blocks but the empty ones: both sides know which are empty."""
        for peer in range(self.size):
            if peer != self.rank and blocks.counts[peer]:
                yield peer, blocks.block(peer)

    def _broadcast(self, block: DeviceBuffer, root: int) -> Call:
        return ("ncclBroadcast", block.address, block.address, len(block), UINT8, root)

    def _start(self, calls: Sequence[Call], *buffers: DeviceBuffer) -> Handle:
        if self._showing is not None:
            # Also if this rank moves nothing: others may.
            call, self.shown = self._showing
            calls, self._showing = [call, *calls], None
        if not calls:
            return Nothing()
        self.comm.issue(calls, self.memory.stream, *buffers)
        return _Operation(self.comm)

    # Reductions

    def reduces(self, op: str, dtype: DType) -> bool:
        kind = kind_of(dtype)
        allowed = _EXACT if self._reproducible else _EXACT | _ROUNDED
        return op in allowed.get(kind, ()) and BY_DTYPE[_part(dtype)].nccl is not None

    def allreduce(self, source: DeviceBuffer, target: DeviceBuffer, op: str) -> Handle:
        parts = source.view(_part(source.dtype))
        kind = BY_DTYPE[parts.dtype].nccl
        reduce: Call = (
            "ncclAllReduce", source.address, target.address, len(parts), kind, _OPS[op]
        )  # fmt: skip
        return self._start([reduce] if len(parts) else [], source, target)

    # The end of the link

    def error(self) -> TransportError | None:
        """Return NCCL's error, if any, also one between devices after a call has returned."""
        return self.comm.error()

    def abort(self) -> None:
        """End the link and its work at once; may be called again, by any thread.

        Every rank has to call it; no rank waits for the others. Unfinished results are undefined.
        """
        self.comm.abort()

    def close(self) -> None:
        """Release the link; collective. Abort it if the other ranks do not come within seconds."""
        self.comm.close()


def lets_share() -> bool:
    """Return whether this rank's NCCL is set to let ranks share a device."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def refuse_sharing(uuids: Sequence[str], shares: Sequence[bool]) -> str | None:
    """Say why NCCL cannot join these devices, if some ranks share one.

    None if each rank has its own device, or if every rank's NCCL is set to let ranks share one.
    `uuids` and `shares`, what `lets_share` said on each rank, are in rank order.
    """
    shared = shared_devices(uuids)
    if not shared or all(shares):
        return None
    return (
        f"{shared}, and NCCL wants one for each rank; start fewer ranks on a node, or use "
        'backend="mpi", or set NCCL_MULTI_RANK_GPU_ENABLE=1 on every rank, which is slow and '
        "only for tests"
    )


def let_share(uuids: Sequence[str], version: tuple[int, ...]) -> None:
    """Let an NCCL before 2.30 join ranks that share a device.

    It refuses them if they are on one host. So each rank is given a host of its own, unless the
    environment names one, and the ranks are joined by sockets.
    """
    if shared_devices(uuids) and version < _FIRST_TO_SHARE:
        os.environ.setdefault("NCCL_HOSTID", secrets.token_hex(16))


def _send(block: DeviceBuffer, peer: int) -> Call:
    return ("ncclSend", block.address, len(block), UINT8, peer)


def _recv(block: DeviceBuffer, peer: int) -> Call:
    return ("ncclRecv", block.address, len(block), UINT8, peer)


def _in_equal_rows(blocks: Blocks) -> bool:
    count = blocks.counts[0]
    return all(
        (length, offset) == (count, rank * count)
        for rank, (length, offset) in enumerate(zip(blocks.counts, blocks.offsets, strict=True))
    )


def _part(dtype: DType) -> DType:
    """Return the dtype that NCCL sums: a complex number is a pair of floats."""
    return np.empty(0, dtype).real.dtype if kind_of(dtype) is Kind.COMPLEX else dtype
