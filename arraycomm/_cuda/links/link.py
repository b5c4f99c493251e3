"""A link between the devices of a group's ranks, in the order of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory
from arraycomm._dtypes import DType
from arraycomm._errors import TransportError
from arraycomm._transports.base import Blocks, Handle, Link, Steps, Transport


class Nothing:
    """A movement in which this rank neither sends nor receives."""

    def done(self) -> bool:
        return True


class DeviceLink(Link):
    """The movements between the ranks' devices, in the order of the memory's stream."""

    name: str
    memory: DeviceMemory
    # Whether only the device, and never the host, waits for the other ranks' movements. Then the
    # device's work starts before the header is checked.
    async_check: bool = False
    # The digests of all ranks' headers, once they are gathered: see `show`.
    shown: DeviceBuffer | None = None

    def show(self, digest: int, digests: DeviceBuffer) -> None:
        """Have the ranks' digests gathered along with the next movement, if it may go ahead.

        All ranks have to do so before the same movement, each with a digest of its own header.
        `digests` has room for those of all ranks, and for this one's behind.
        """

    def take(self, count: int, dtype: DType) -> DeviceBuffer:
        return self.empty(count, dtype)

    def empty(self, count: int, dtype: DType) -> DeviceBuffer:
        return self.memory.allocate(count * dtype.itemsize).view(dtype)

    def load(self, op: str, dtype: DType) -> None:
        self.memory.load(op, dtype)

    def fold(self, op: str, dtype: DType, rows: Sequence[DeviceBuffer], out: DeviceBuffer) -> None:
        self.memory.fold(op, dtype, rows, out)

    def prefixes(
        self, op: str, dtype: DType, rows: Sequence[DeviceBuffer], outs: Sequence[DeviceBuffer]
    ) -> None:
        self.memory.prefixes(op, dtype, rows, outs)

    def send(self, buffer: DeviceBuffer, dest: int, tag: int) -> Handle:
        raise NotImplementedError

    def recv(self, buffer: DeviceBuffer, source: int, tag: int) -> Handle:
        raise NotImplementedError

    def at(self, stream: int) -> Self:
        """Return the same link for movements in another stream; this object keeps its own."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, memory=self.memory.at(stream))
        return other

    def split(self, color: int | None, key: int) -> Steps:
        """Return the link of the ranks of one color, or None if it has to be opened anew."""
        yield from ()
        return None

    def over(self, transport: Transport) -> Self | None:
        """Return the link of other ranks, if it takes no more than a transport between them."""
        return None

    def error(self) -> TransportError | None:
        """Return the error of a movement that failed after it was issued, if there is one."""
        return None

    def abort(self) -> None:
        """Abort the movements under way; any thread may call it, once the ranks are out of step."""

    def close(self) -> None:
        """Release the link, after all movements have finished."""


class LoneLink(DeviceLink):
    """The movements of a group of one rank; the host waits for none of them."""

    name = "self"
    rank, size = 0, 1
    chunk_bytes = 64 << 20

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory

    def over(self, transport: Transport) -> Self:
        return type(self)(self.memory.separate())

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        recv.block(0)[...] = send.block(0)
        return Nothing()

    def allgather(self, recv: Blocks) -> Handle:
        return Nothing()

    def gather(self, send: DeviceBuffer, recv: Blocks | None, root: int) -> Handle:
        if recv is not None:
            recv.block(0)[...] = send
        return Nothing()

    def scatter(self, send: Blocks | None, recv: DeviceBuffer, root: int) -> Handle:
        if send is not None:
            recv[...] = send.block(0)
        return Nothing()

    def bcast(self, buffer: DeviceBuffer, root: int) -> Handle:
        return Nothing()
