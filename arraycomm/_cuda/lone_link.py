"""The link of one rank alone: what it sends to itself is copied on the device."""

from __future__ import annotations

from typing import Self

from arraycomm._arrays.device_memory import DeviceBuffer, DeviceMemory
from arraycomm._cuda.link import DeviceLink, Nothing
from arraycomm._transports.base import Blocks, Handle, Transport


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
