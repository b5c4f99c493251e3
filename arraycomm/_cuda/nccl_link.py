"""Movements between CUDA devices through NCCL, beside a transport that joins their hosts.

All is done in the order of one stream: a movement is finished here when it has its place there, and
what is asked of the device next comes after it. Bytes move, whatever their dtype; NCCL reduces only
where no order of summation shows.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from copy import copy
from typing import Final

import numpy as np

from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory
from arraycomm._cuda.device import shared_devices
from arraycomm._cuda.libnccl import UINT8, Call, Comm, Library
from arraycomm._dtypes import BY_DTYPE, DType, Kind, kind_of
from arraycomm._errors import TransportError
from arraycomm._transports.base import Blocks, DeviceLink, Handle

# ncclRedOp_t
_OPS: Final = {"sum": 0, "prod": 1, "max": 2, "min": 3}
# The reductions whose bits do not depend on the order, and those whose rounding does. NCCL's min and
# max of floats lose NaN, and it rounds floats of 16 and 8 bits at every step: it reduces none of these.
_EXACT: Final = {Kind.INTEGER: frozenset(_OPS)}
_ROUNDED: Final = {Kind.FLOAT: frozenset(("sum", "prod")), Kind.COMPLEX: frozenset(("sum",))}
_FIRST_TO_SHARE: Final = (2, 30)


class _Nothing:
    """A movement in which this rank neither sends nor receives."""

    def done(self) -> bool:
        return True


class _Operation:
    """An operation that NCCL is putting on its stream."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._over = False

    def done(self) -> bool:
        if not self._over:
            self._over = not self._comm.in_progress()
        return self._over


class NcclLink(DeviceLink):
    """One rank's device, joined to the others'.

    Parameters
    ----------
    comm : Comm
        What NCCL has of it; not in progress.
    memory : Memory
        The device's. Movements take their place on its current stream.
    rank, size : int
        This rank, and how many there are.
    reproducible : bool
        Whether floats have to be summed in rank order, which NCCL does not do.
    """

    name = "nccl"
    ahead = True
    # Enough for NCCL to come to speed, and as many bytes of scratch as a device can spare.
    chunk_bytes = 64 << 20

    def __init__(
        self, comm: Comm, memory: DeviceMemory, rank: int, size: int, *, reproducible: bool = True
    ) -> None:
        self.memory = memory
        self.rank = rank
        self.size = size
        self._comm = comm
        self._reproducible = reproducible

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
        """Join the ranks that have the same `unique_id`; a program that returns the link.

        Ranks that do not come keep it waiting; whoever gives it up has undone it.
        """
        comm = Comm.begin(library, memory.device, rank, size, unique_id)
        try:
            yield _Operation(comm)
        except BaseException:
            comm.abort()
            raise
        return cls(comm, memory, rank, size, reproducible=reproducible)

    def split(self, color: int | None, key: int) -> Generator[Handle, None, NcclLink | None]:
        """Make the link of the ranks of one color, in the order of their keys; a program.

        Collective, also for ranks of no color, which get None. So do all where this NCCL is too old:
        then `open` makes a new one.
        """
        child = self._comm.split(color, key)
        if child is None:
            return None
        try:
            yield _Operation(self._comm)
            if color is None:
                return None
            yield _Operation(child)
            # A memory of its own, since its calls have streams of their own.
            memory = copy(self.memory)
            return type(self)(child, memory, *child.place(), reproducible=self._reproducible)
        except BaseException:
            # The unfinished half belongs to the communicator that is being split.
            self._comm.abort()
            child.abort()
            raise

    # Movements

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        _copy(recv.block(self.rank), send.block(self.rank))
        return self._start([*self._sends(send), *self._recvs(recv)], send.buffer, recv.buffer)

    def allgather(self, recv: Blocks) -> Handle:
        count = recv.counts[0]
        if _in_equal_rows(recv):
            mine = recv.block(self.rank)
            # NCCL takes this for in place, by the addresses.
            even: Call = ("ncclAllGather", mine.address, recv.buffer.address, count, UINT8)
            return self._start([even] if count else [], recv.buffer)
        blocks = [recv.block(rank) for rank in range(self.size)]
        calls = [self._broadcast(block, rank) for rank, block in enumerate(blocks) if len(block)]
        return self._start(calls, recv.buffer)

    def gather(self, send: DeviceBuffer, recv: Blocks | None, root: int) -> Handle:
        if recv is None:
            return self._start([_send(send, root)] if len(send) else [], send)
        _copy(recv.block(root), send)
        return self._start(list(self._recvs(recv)), send, recv.buffer)

    def scatter(self, send: Blocks | None, recv: DeviceBuffer, root: int) -> Handle:
        if send is None:
            return self._start([_recv(recv, root)] if len(recv) else [], recv)
        _copy(recv, send.block(root))
        return self._start(list(self._sends(send)), send.buffer, recv)

    def bcast(self, buffer: DeviceBuffer, root: int) -> Handle:
        return self._start([self._broadcast(buffer, root)] if len(buffer) else [], buffer)

    def _sends(self, blocks: Blocks) -> Iterator[Call]:
        return (_send(block, peer) for peer, block in self._others(blocks))

    def _recvs(self, blocks: Blocks) -> Iterator[Call]:
        return (_recv(block, peer) for peer, block in self._others(blocks))

    def _others(self, blocks: Blocks) -> Iterator[tuple[int, DeviceBuffer]]:
        """The other ranks' blocks, without the empty ones: both sides know which these are."""
        for peer in range(self.size):
            if peer != self.rank and blocks.counts[peer]:
                yield peer, blocks.block(peer)

    def _broadcast(self, block: DeviceBuffer, root: int) -> Call:
        return ("ncclBroadcast", block.address, block.address, len(block), UINT8, root)

    def _start(self, calls: Sequence[Call], *spans: DeviceBuffer) -> Handle:
        if not calls:
            return _Nothing()
        self._comm.issue(calls, self.memory.stream, *spans)
        return _Operation(self._comm)

    # Reductions

    def native(self, op: str, dtype: DType) -> bool:
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

    # How it ends

    def error(self) -> TransportError | None:
        """Return what has gone wrong since, also between the devices and after a call returned."""
        try:
            self._comm.in_progress()
        except TransportError as error:
            return error
        return None

    def abort(self) -> None:
        """End the link at once, with what is under way; may be called again, by any thread.

        Every rank has to, and does not wait for the others. What was being written is undefined.
        """
        self._comm.abort()

    def close(self) -> None:
        """Release the link, with every rank in it; abort it if they do not come within seconds."""
        self._comm.close()


def refuse_sharing(uuids: Sequence[str], version: tuple[int, ...]) -> str | None:
    """Say why NCCL cannot join these devices, one name a rank, some of which are the same.

    None where it can: a device of its own for each rank, or a NCCL that was told to let them share.
    """
    shared = shared_devices(uuids)
    able = version >= _FIRST_TO_SHARE
    if not shared or (able and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"):
        return None
    so = "" if able else f" with NCCL 2.30 or newer (this is {'.'.join(map(str, version))})"
    return (
        f"{shared}, and NCCL wants one for each rank; start fewer ranks on a node, or use "
        f'backend="mpi", or set NCCL_MULTI_RANK_GPU_ENABLE=1 on every rank{so}, which is experimental'
    )


def _send(block: DeviceBuffer, peer: int) -> Call:
    return ("ncclSend", block.address, len(block), UINT8, peer)


def _recv(block: DeviceBuffer, peer: int) -> Call:
    return ("ncclRecv", block.address, len(block), UINT8, peer)


def _copy(target: DeviceBuffer, source: DeviceBuffer) -> None:
    target[...] = source


def _in_equal_rows(blocks: Blocks) -> bool:
    count = blocks.counts[0]
    return all(
        (length, offset) == (count, rank * count)
        for rank, (length, offset) in enumerate(zip(blocks.counts, blocks.offsets, strict=True))
    )


def _part(dtype: DType) -> DType:
    """Return the dtype as a sum sees it: complex numbers are pairs of floats."""
    return np.empty(0, dtype).real.dtype if kind_of(dtype) is Kind.COMPLEX else dtype
